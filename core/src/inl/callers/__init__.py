"""The protocol of programs in other languages: ``inl pipe`` on its standard streams."""
