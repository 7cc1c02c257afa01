from inl_toolkit.hardware import *
