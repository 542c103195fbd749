"""The user's line, told as people would write it."""

from __future__ import annotations

import os
import sys

from torchlazy.lazy.trace import user_frames


def test_a_file_below_the_working_folder_is_told_from_there(monkeypatch, tmp_path):
    (tmp_path / "below").mkdir()
    file = str(tmp_path / "below" / "model.py")
    monkeypatch.chdir(tmp_path)
    assert user_frames._short(file) == os.path.join("below", "model.py")
    monkeypatch.chdir(tmp_path / "below")
    assert user_frames._short(file) == "model.py", "what was told from another folder is not remembered"
    (tmp_path / "beside").mkdir()
    monkeypatch.chdir(tmp_path / "beside")
    assert user_frames._short(file) == file
    assert user_frames._short("<stdin>") == "<stdin>"


def test_a_working_folder_that_was_removed_is_no_reason_to_fail(monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    try:
        told = user_frames.user_frame()
    finally:
        os.chdir(tmp_path)
    assert told.endswith(f"test_frames.py:{sys._getframe().f_lineno - 3}")
