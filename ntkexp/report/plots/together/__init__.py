"""Pictures of a sweep.

Each module has a function `pictures(analysis, runs)`, which yields a `SweepPicture` for
each picture. `SweepPicture.draw(canvas)` draws the picture.
"""
