"""Tests of the transport of NIXL."""

from needed_packages import needing

pytest_pycollect_makemodule = needing("nixl", "inl_nixl")
