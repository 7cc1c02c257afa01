from inl_toolkit.hardware.tpu import *
