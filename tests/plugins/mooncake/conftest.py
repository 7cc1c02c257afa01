"""Tests of the store of Mooncake."""

from needed_packages import needing

pytest_pycollect_makemodule = needing("mooncake", "inl_mooncake")
