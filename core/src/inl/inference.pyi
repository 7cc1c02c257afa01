from inl_toolkit.inference import *
