//! Vectors of numbers on the device: activations in bf16, everything else in f32.

use half::bf16;
use half::slice::HalfFloatSliceExt;

use super::CudaDevice;
use super::allocator::Memory;
use super::arguments::{Address, CastToBf16, CastToFloat, MoveRows, ScaleFloats};
use super::indices::{Table, narrow};
use crate::device::ops::Role;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    Bf16,
    F32,
}

impl Precision {
    pub fn bytes(self) -> usize {
        match self {
            Precision::Bf16 => size_of::<bf16>(),
            Precision::F32 => size_of::<f32>(),
        }
    }
}

impl From<Role> for Precision {
    fn from(role: Role) -> Precision {
        if matches!(role, Role::Activations | Role::Travelling) { Precision::Bf16 } else { Precision::F32 }
    }
}

/// A vector of numbers on the device.
pub struct Buffer {
    memory: Memory,
    precision: Precision,
    length: usize,
}

impl Buffer {
    pub fn length(&self) -> usize {
        self.length
    }
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Where at least `length` numbers of this precision start. Panics if there are fewer or others: the kernels trust this.
    pub fn holding(&self, precision: Precision, length: usize) -> Address {
        assert!(
            self.precision == precision && self.length >= length,
            "a buffer of {} {:?} where {length} {precision:?} are needed",
            self.length,
            self.precision
        );
        self.memory.address()
    }
    pub fn bf16(&self, length: usize) -> Address {
        self.holding(Precision::Bf16, length)
    }
    pub fn f32(&self, length: usize) -> Address {
        self.holding(Precision::F32, length)
    }

    fn at(&self, offset: usize) -> Address {
        self.memory.address() + (offset * self.precision.bytes()) as Address
    }
}

impl CudaDevice {
    /// A buffer whose content nobody has written yet.
    fn buffer(&self, role: Role, length: usize) -> Buffer {
        let precision = Precision::from(role);
        let memory = self.allocate(role.into(), length * precision.bytes());
        Buffer { memory, precision, length }
    }

    pub(super) fn zeroed_buffer(&self, role: Role, length: usize) -> Buffer {
        let mut buffer = self.buffer(role, length);
        self.clear_buffer(&mut buffer, length);
        buffer
    }

    pub(super) fn uploaded_buffer(&self, role: Role, values: &[f32]) -> Buffer {
        let mut buffer = self.buffer(role, values.len());
        self.write_buffer(&mut buffer, 0, values);
        buffer
    }

    /// Rounds to bf16 (to nearest, ties to even) where the buffer is of that.
    pub(super) fn write_buffer(&self, buffer: &mut Buffer, offset: usize, values: &[f32]) {
        assert!(offset + values.len() <= buffer.length, "{} values at {offset} of {}", values.len(), buffer.length);
        match buffer.precision {
            // SAFETY: the range was checked.
            Precision::F32 => unsafe { self.gpu().write(buffer.at(offset), values) },
            Precision::Bf16 => {
                let mut rounded = vec![bf16::ZERO; values.len()];
                rounded.convert_from_f32_slice(values);
                // SAFETY: as above.
                unsafe { self.gpu().write(buffer.at(offset), &rounded) }
            }
        }
    }

    pub(super) fn read_buffer(&self, buffer: &Buffer, offset: usize, length: usize) -> Vec<f32> {
        assert!(offset + length <= buffer.length, "{length} values at {offset} of {}", buffer.length);
        match buffer.precision {
            // SAFETY: the range was checked.
            Precision::F32 => unsafe { self.gpu().read::<f32>(buffer.at(offset), length) },
            // SAFETY: as above.
            Precision::Bf16 => unsafe { self.gpu().read::<bf16>(buffer.at(offset), length) }.to_f32_vec(),
        }
    }

    pub(super) fn clear_buffer(&self, buffer: &mut Buffer, length: usize) {
        let bytes = length * buffer.precision.bytes();
        // SAFETY: the length is checked in `holding`; zero bytes are zeros of both precisions.
        unsafe { self.gpu().clear(buffer.holding(buffer.precision, length), bytes) };
    }

    /// Offsets of a copy that changes the precision are multiples of what its kernel loads at once.
    pub(super) fn copy_buffer(&self, from: &Buffer, from_offset: usize, to: &mut Buffer, to_offset: usize, length: usize) {
        let inside = |buffer: &Buffer, offset: usize| offset + length <= buffer.length;
        assert!(inside(from, from_offset) && inside(to, to_offset), "{length} numbers beyond the end of a buffer");
        let (source, target) = (from.at(from_offset), to.at(to_offset));
        match (from.precision, to.precision) {
            (Precision::F32, Precision::Bf16) => self.cast_to_bf16(source, target, length),
            (Precision::Bf16, Precision::F32) => {
                let arguments = CastToFloat { from: source, to: target, length: length as i64 };
                self.kernels().launch_striding("cast_to_float", length.div_ceil(8), &arguments);
            }
            // SAFETY: both ranges were checked.
            (same, _) => unsafe { self.gpu().copy(source, target, length * same.bytes()) },
        }
    }

    /// `to = round(from)`: addresses of f32 and bf16.
    pub(super) fn cast_to_bf16(&self, from: Address, to: Address, length: usize) {
        self.kernels().launch_striding("cast_to_bf16", length.div_ceil(8), &CastToBf16 { from, to, length: length as i64 });
    }

    pub(super) fn scale_buffer(&self, buffer: &mut Buffer, factor: f32) {
        let arguments = ScaleFloats { values: buffer.f32(buffer.length), length: buffer.length as i64, factor, reserved: 0 };
        self.kernels().launch_striding("scale_floats", buffer.length.div_ceil(4), &arguments);
    }

    pub(super) fn gathered_rows(&self, from: &Buffer, rows: &[usize], width: usize, to: &mut Buffer) {
        let needed = rows.iter().max().map_or(0, |last| (last + 1) * width);
        let (from, to) = (from.bf16(needed), to.bf16(rows.len() * width));
        self.move_rows("gather_rows", Table::GatheredRows, from, to, rows, width);
    }

    pub(super) fn scattered_rows(&self, from: &Buffer, rows: &[usize], width: usize, to: &mut Buffer) {
        let needed = rows.iter().max().map_or(0, |last| (last + 1) * width);
        let (from, to) = (from.bf16(rows.len() * width), to.bf16(needed));
        self.move_rows("scatter_rows", Table::ScatteredRows, from, to, rows, width);
    }

    fn move_rows(&self, kernel: &str, table: Table, from: Address, to: Address, rows: &[usize], width: usize) {
        let numbers = self.tables().upload(table, &narrow(rows.iter().copied()));
        let arguments = MoveRows { from, to, rows: numbers, count: rows.len() as i64, width: width as i64 };
        self.kernels().launch_striding(kernel, rows.len() * width / 8, &arguments);
    }
}
