//! Servers as the trainer uses them, against one that behaves as badly as it is told to.

mod end;
mod life;
mod load;
mod support;
