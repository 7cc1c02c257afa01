from inl_toolkit.hardware.edge_tpu import *
