from inl_toolkit.nn import *
from inl_toolkit.nn import __getattr__ as __getattr__
