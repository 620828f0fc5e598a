"""Elastic networks: one declared network, the submodels of it, and exact aggregation of what they learn.

A `Network` is declared once, by its family, as plain data: axes (classes of tied tensor dimensions), skippable blocks
and tensors. Maps, shapes, modules, spaces of submodels and costs are all derived from that declaration.
"""
