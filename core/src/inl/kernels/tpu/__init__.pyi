from inl_toolkit.kernels.tpu import *
