from inl_toolkit.kernels import *
