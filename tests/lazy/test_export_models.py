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


@pytest.mark.parametrize("make", [bert, gpt2, llama])
def test_batch_and_length_vary(make: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make().eval()
    more = {} if make is bert else {"use_cache": False}
    exported = torchlazy.export(model, (), tokens(2, 10, **more), dynamic=DYNAMIC)
    torch.export.save(exported, tmp_path / "model.pt2")
    module, loaded = exported.module(), torchlazy.load(tmp_path / "model.pt2")
    if make is bert:
        assert any(str(ends.upper) == "64" for ends in exported.range_constraints.values())  # its positions
    for shape in ((2, 10), (1, 7), (3, 33), (5, 64)):
        given = tokens(*shape, **more)
        with torch.no_grad():
            want = model(**given)
        for program in (module, loaded):
            got = program(**given)
            assert list(got) == list(want)
            for key in want:
                torch.testing.assert_close(got[key], want[key], rtol=1e-4, atol=1e-5)


RUNNER = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("transformers", "torchlazy"):
            raise ImportError(f"{name} is not to be imported here")
sys.meta_path.insert(0, Block())
import torch
given = torch.load(sys.argv[2], weights_only=True)
torch.save(torch.export.load(sys.argv[1]).module()(**given), sys.argv[3])
"""


def test_it_runs_where_the_libraries_are_not(tmp_path: Path) -> None:
    model = bert().eval()
    torch.export.save(torchlazy.export(model, (), tokens(2, 10), dynamic=DYNAMIC), tmp_path / "bert.pt2")
    given = tokens(3, 21)
    torch.save(given, tmp_path / "given.pt")
    files = [str(tmp_path / name) for name in ("bert.pt2", "given.pt", "result.pt")]
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # torch would import this package
    command = [sys.executable, "-c", RUNNER, *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    result = torch.load(tmp_path / "result.pt", weights_only=True)
    with torch.no_grad():
        want = model(**given)
    for key in want:
        torch.testing.assert_close(result[key], want[key], rtol=1e-4, atol=1e-5)


def test_a_cache_of_keys_is_no_plain_result() -> None:
    with pytest.raises(torchlazy.lazy.export.record.ExportError, match="use_cache=False"):
        torchlazy.export(llama().eval(), (), tokens(2, 10, use_cache=True))
