from inl_toolkit.functional.dynamics import *
