//! What people see: header, progress, tables, curves, the run page.
