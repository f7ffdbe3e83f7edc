//! Tools, parsing of tool calls, the episode loop.
