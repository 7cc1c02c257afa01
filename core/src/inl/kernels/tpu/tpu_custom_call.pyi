from inl_toolkit.kernels.tpu.tpu_custom_call import *
