//! Where programs run: isolation, limits, supervision, output.
