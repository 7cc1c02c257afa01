from inl_toolkit.functional.moe import *
