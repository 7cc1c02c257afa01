"""What plugins print goes to standard error, whatever threads load them."""

from __future__ import annotations

import sys

from inl.plugin.printed import stdout_to_stderr


def test_blocks_that_overlap_restore_standard_output(capsys):
    """Two ranks are started by two threads: the one that began first ends first."""
    first, second = stdout_to_stderr(), stdout_to_stderr()
    own = sys.stdout
    first.__enter__()
    print("one")
    second.__enter__()
    first.__exit__(None, None, None)
    print("two")
    second.__exit__(None, None, None)
    assert sys.stdout is own
    print("three")
    assert capsys.readouterr() == ("three\n", "one\ntwo\n")
