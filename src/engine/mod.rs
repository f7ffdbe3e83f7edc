//! Where tokens come from.
