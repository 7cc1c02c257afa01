"""TODO"""
from inl.device import DeviceInfo
def probe(): return [DeviceInfo(0,"directml code on cpu")]
