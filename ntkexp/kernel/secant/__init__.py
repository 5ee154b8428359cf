"""Secants: how a difference of weights passes through what was recorded, exactly, as one linear map."""
