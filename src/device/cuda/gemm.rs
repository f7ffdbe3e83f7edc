//! Matrix products: our own kernels, whose rows have the same bits in any company, or cuBLASLt, to measure against.

use super::CudaDevice;
use super::arguments::{Address, Gemm};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// `A [m, k]`, `B [n, k]`: `y = x W^T`
    Nt,
    /// `A [m, k]`, `B [k, n]`: `dx = dy W`
    Nn,
    /// `A [k, m]`, `B [k, n]`: `dW = dy^T x`
    Tn,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Output {
    Bf16,
    F32,
    /// Added to f32.
    Add,
}

/// `C [m, n]` from bf16 operands; pitches are in elements.
#[derive(Clone, Copy, Debug)]
pub struct Product {
    pub layout: Layout,
    pub output: Output,
    pub a: Address,
    pub b: Address,
    pub c: Address,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub pitch_c: usize,
}

impl Product {
    /// Elements from one row of A, and of B, to the next.
    pub fn pitches(&self) -> (usize, usize) {
        match self.layout {
            Layout::Nt => (self.k, self.k),
            Layout::Nn => (self.k.next_multiple_of(8), self.n),
            Layout::Tn => (self.m.next_multiple_of(8), self.n),
        }
    }
}

/// Rows and columns of C that one block computes.
type TileSize = (usize, usize);

/// The largest tile that still gives every multiprocessor a block; few rows have a flat one. No bit depends on it.
fn tile(product: &Product, multiprocessors: usize) -> TileSize {
    let (m, n) = (product.m, product.n);
    if m <= 16 && product.layout != Layout::Tn {
        (16, 64)
    } else if m.div_ceil(128) * n.div_ceil(128) >= multiprocessors {
        (128, 128)
    } else {
        (64, 64)
    }
}

impl CudaDevice {
    pub(super) fn multiply(&self, product: &Product) {
        if product.m == 0 || product.n == 0 || product.k == 0 && product.output == Output::Add {
            return;
        }
        match self.cublaslt() {
            Some(library) => library.multiply(product),
            None => self.multiply_own(product),
        }
    }

    fn multiply_own(&self, product: &Product) {
        let (rows, columns) = tile(product, self.gpu().multiprocessors);
        let layout = match product.layout {
            Layout::Nt => "nt",
            Layout::Nn => "nn",
            Layout::Tn => "tn",
        };
        let output = match product.output {
            Output::Bf16 => "bf16",
            Output::F32 => "f32",
            Output::Add => "add",
        };
        let (pitch_a, pitch_b) = product.pitches();
        let arguments = Gemm {
            a: product.a,
            b: product.b,
            c: product.c,
            m: product.m as i64,
            n: product.n as i64,
            k: product.k as i64,
            pitch_a: pitch_a as i64,
            pitch_b: pitch_b as i64,
            pitch_c: product.pitch_c as i64,
        };
        let grid = [product.n.div_ceil(columns), product.m.div_ceil(rows), 1];
        self.kernels().launch(&format!("gemm_{layout}_{output}_{rows}x{columns}"), grid, &arguments);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_follow_the_shape() {
        let product = |layout, m, n| Product { layout, output: Output::Bf16, a: 0, b: 0, c: 0, m, n, k: 64, pitch_c: n };
        assert_eq!(tile(&product(Layout::Nt, 1, 4096), 132), (16, 64));
        assert_eq!(tile(&product(Layout::Nt, 64, 4096), 132), (64, 64));
        assert_eq!(tile(&product(Layout::Nn, 4096, 4096), 132), (128, 128));
        assert_eq!(tile(&product(Layout::Tn, 8, 8), 132), (64, 64), "there is no flat tile for weight gradients");
    }
}
