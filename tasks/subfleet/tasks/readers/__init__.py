"""Readers of the formats of published data sets; they unpickle and unpack nothing."""
