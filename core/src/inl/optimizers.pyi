from inl_toolkit.optimizers import *
