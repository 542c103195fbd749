"""The pages of results have a row for each result there is, and are pages without any."""

import json

from tests.opinfo import table as opinfo
from tests.zoo import table as zoo


def test_models_have_rows_and_failures_their_causes(tmp_path, monkeypatch):
    monkeypatch.setattr(zoo, "RESULTS", tmp_path)
    assert "0 of 0 models" in zoo.page()
    result = {"mode": "lazy", "largest": 0.0, "seconds": 1.0, "cuts": {}, "commit": "abc1234", "torch": "2.13.0"}
    for name, outcome in (("second", "equal"), ("first", "crash")):
        text = json.dumps({**result, "case": name, "outcome": outcome, "error": "the process died"})
        (tmp_path / f"lazy-{name}.json").write_text(text)
    text = zoo.page()
    assert "- lazy: 1 of 2 models are equal (abc1234 with torch 2.13.0, 2 models)" in text
    assert text.index("| first | crash |") < text.index("| second | equal |")
    assert "lazy `first` crash: the process died" in text


def test_operators_are_counted_and_failures_told(tmp_path, monkeypatch):
    monkeypatch.setattr(opinfo, "RESULTS", tmp_path)
    assert "## Known exceptions" in opinfo.page() and opinfo.page().endswith("None.\n")
    result = {"reading": "b", "dtype": "float32", "passed": 3, "commit": "abc1234", "torch": "2.13.0", "limit": 0}
    lines = [{**result, "op": "add", "failures": []}, {**result, "op": "mul", "failures": [[0, "value", "differs"]]}]
    (tmp_path / "b-float32.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert "| b | float32 | abc1234 | 2.13.0 | all | 2 | 1 | 0 | 1 | 6 | 0 | 0 |" in opinfo.page()
    assert "- b float32 `mul` value (#0, 1): differs" in opinfo.page()
