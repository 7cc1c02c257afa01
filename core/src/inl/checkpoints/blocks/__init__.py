"""Dtypes whose elements share scales in blocks: sizes, decoders and encoders."""
