"""Unmodified small models of the transformers library as exported programs, batch and length varying."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torchlazy

transformers = pytest.importorskip("transformers")
SMALL: dict[str, Any] = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def bert() -> Any:
    return transformers.BertModel(transformers.BertConfig(**SMALL, intermediate_size=64, max_position_embeddings=64))


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
        )
    )


def llama() -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, num_key_value_heads=2, intermediate_size=64, max_position_embeddings=64)
    )


def tokens(batch: int, length: int, **more: Any) -> dict[str, Any]:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, length // 2 :] = 0  # a padded row
    return {"input_ids": torch.randint(0, 99, (batch, length)), "attention_mask": mask, **more}


DYNAMIC = {"input_ids": {0: "batch", 1: "length"}, "attention_mask": {0: "batch", 1: "length"}}


@pytest.mark.parametrize("dialect", ["aten", "prims"])
@pytest.mark.parametrize("make", [bert, gpt2, llama])
def test_batch_and_length_vary(make: Any, dialect: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make().eval()
    more = {} if make is bert else {"use_cache": False}
    exported = torchlazy.export(model, (), tokens(2, 10, **more), dynamic=DYNAMIC, dialect=dialect)
    exported.save(tmp_path / "model.tlz")
    loaded = torchlazy.load(tmp_path / "model.tlz")
    sizes = {size.name: size for size in exported.graph.sizes}
    assert sizes["batch"].low == 1 and sizes["batch"].high is None
    if make is bert:
        assert sizes["length"].high == 64  # its positions
    for shape in ((2, 10), (1, 7), (3, 33), (5, 64)):
        given = tokens(*shape, **more)
        with torch.no_grad():
            want = model(**given)
        for program in (exported, loaded):
            got = program(**given)
            assert list(got) == list(want)
            for key in want:
                torch.testing.assert_close(got[key], want[key], rtol=1e-4, atol=1e-5)


RUNNER = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("transformers", "sympy") or name.startswith("torchlazy.inductor"):
            raise ImportError(f"{name} is not to be imported here")
sys.meta_path.insert(0, Block())
import torch, torchlazy
given = torch.load(sys.argv[2], weights_only=True)
torch.save(dict(torchlazy.load(sys.argv[1])(**given)), sys.argv[3])
assert "transformers" not in sys.modules
"""


def test_it_runs_where_the_library_is_not(tmp_path: Path) -> None:
    model = bert().eval()
    torchlazy.export(model, (), tokens(2, 10), dynamic=DYNAMIC).save(tmp_path / "bert.tlz")
    given = tokens(3, 21)
    torch.save(given, tmp_path / "given.pt")
    files = [str(tmp_path / name) for name in ("bert.tlz", "given.pt", "result.pt")]
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, *files], capture_output=True, text=True, timeout=600, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    result = torch.load(tmp_path / "result.pt", weights_only=True)
    with torch.no_grad():
        want = model(**given)
    for key in want:
        torch.testing.assert_close(result[key], want[key], rtol=1e-4, atol=1e-5)


def test_as_a_program_of_torch() -> None:
    model = llama().eval()
    exported = torchlazy.export(model, (), tokens(2, 10, use_cache=False), dynamic=DYNAMIC)
    program = exported.to_exported_program()
    given = tokens(3, 21)
    with torch.no_grad():
        want = model(**given).logits
    got = program.module()(**given, use_cache=False)
    torch.testing.assert_close(got["logits"], want, rtol=1e-4, atol=1e-5)


def test_a_cache_of_keys_is_no_plain_result() -> None:
    with pytest.raises(torchlazy.lazy.export.record.ExportError, match="use_cache=False"):
        torchlazy.export(llama().eval(), (), tokens(2, 10, use_cache=True))
