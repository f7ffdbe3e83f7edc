//! The run file: every room owns its settings, this room composes and checks them.
