from inl_toolkit.functional import *
