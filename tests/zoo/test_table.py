"""The page of results: a run of a part leaves rows alone whose results it does not have."""

import json

from tests.zoo import table


def _result(folder, mode, name):
    found = {"mode": mode, "case": name, "outcome": "equal", "largest": 0.0, "seconds": 1.0, "cuts": {}, "externs": {}}
    (folder / f"{mode}-{name}.json").write_text(json.dumps({**found, "commit": "abc1234", "torch": "2.13.0"}))


def test_rows_without_results_are_kept(tmp_path, monkeypatch):
    results, page = tmp_path / "results", tmp_path / "zoo.md"
    results.mkdir()
    monkeypatch.setattr(table, "RESULTS", results)
    for name in ("first", "second"):
        _result(results, "lazy", name)
    assert table.write_table(page, ["first", "second"]) == page
    whole = page.read_text()
    assert "| first |" in whole and "| second |" in whole

    (results / "lazy-second.json").unlink()
    assert table.write_table(page, ["first", "second"]) == results / "zoo.md"
    assert page.read_text() == whole
    assert "| second |" not in (results / "zoo.md").read_text()

    _result(results, "lazy", "second")
    _result(results, "lazy", "third")
    assert table.write_table(page, ["first", "second", "third"]) == page
    assert "| third |" in page.read_text()
