//! Against fixtures.
