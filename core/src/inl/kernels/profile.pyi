from inl_toolkit.kernels.profile import *
