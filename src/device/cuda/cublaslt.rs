//! cuBLASLt behind the same [`Product`], to measure our own kernels against.
//!
//! cuBLAS counts in columns: a row-major `C [m, n]` is its `C' [n, m]`, and `C = A B` becomes `C' = B' A'` over the same memory.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex};

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{self, cublasLtMatmulAlgo_t as Algorithm};

use super::allocator::{Allocator, Memory, Purpose};
use super::driver::Gpu;
use super::error::{DeviceError, raise};
use super::gemm::{Layout, Output, Product};

/// NVIDIA's advice for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;

/// What an algorithm was chosen for: `(layout, output, m, n, k, pitch of C)`.
type Shape = (Layout, Output, usize, usize, usize, usize);

pub struct CublasLt {
    gpu: Arc<Gpu>,
    handle: sys::cublasLtHandle_t,
    workspace: Memory,
    /// The library's choice for each shape, made once: the same product is the same kernel for the whole run.
    algorithms: Mutex<HashMap<Shape, Algorithm>>,
}

// SAFETY: a handle may be used from several threads; algorithms are plain data.
unsafe impl Send for CublasLt {}
// SAFETY: as above.
unsafe impl Sync for CublasLt {}

impl CublasLt {
    pub fn new(gpu: Arc<Gpu>, allocator: &Arc<Allocator>) -> Result<CublasLt, DeviceError> {
        // SAFETY: only looks for the library.
        if !unsafe { sys::is_culib_present() } {
            return Err(DeviceError::NoCublasLt { names: "libcublasLt.so, libcublasLt.so.13, libcublasLt.so.12".to_string() });
        }
        let workspace = allocator.allocate(Purpose::Workspace, WORKSPACE_BYTES);
        let handle = result::create_handle().map_err(|error| DeviceError::CublasLt(error.to_string()))?;
        Ok(CublasLt { gpu, handle, workspace, algorithms: Mutex::default() })
    }

    pub fn multiply(&self, product: &Product) {
        self.try_multiply(product).unwrap_or_else(|error| raise(format!("cuBLASLt refuses {product:?}: {error}")));
    }

    fn try_multiply(&self, product: &Product) -> Result<(), CublasError> {
        let (m, n, k) = (product.m as u64, product.n as u64, product.k as u64);
        let (pitch_a, pitch_b) = product.pitches();
        let half = sys::cudaDataType_t::CUDA_R_16BF;
        let float = sys::cudaDataType_t::CUDA_R_32F;
        // Rows and columns as cuBLAS sees them, and whether it must transpose.
        let (b, transpose_b) = match product.layout {
            Layout::Nt => (Matrix::new(half, k, n, pitch_b)?, true),
            Layout::Nn | Layout::Tn => (Matrix::new(half, n, k, pitch_b)?, false),
        };
        let (a, transpose_a) = match product.layout {
            Layout::Nt | Layout::Nn => (Matrix::new(half, k, m, pitch_a)?, false),
            Layout::Tn => (Matrix::new(half, m, k, pitch_a)?, true),
        };
        let c = Matrix::new(if product.output == Output::Bf16 { half } else { float }, n, m, product.pitch_c)?;
        let operation = Operation::new(transpose_b, transpose_a)?;
        let algorithm = self.algorithm(product, &operation, &b, &a, &c)?;
        let (alpha, beta) = (1.0f32, if product.output == Output::Add { 1.0f32 } else { 0.0 });
        let pointer = |address: u64| address as *const c_void;
        // SAFETY: the descriptors live to the end of the call; addresses are those of a product that its caller has measured.
        unsafe {
            result::matmul(
                self.handle,
                operation.0,
                std::ptr::from_ref(&alpha).cast(),
                std::ptr::from_ref(&beta).cast(),
                pointer(product.b),
                b.0,
                pointer(product.a),
                a.0,
                pointer(product.c),
                c.0,
                product.c as *mut c_void,
                c.0,
                &algorithm,
                self.workspace.address() as *mut c_void,
                WORKSPACE_BYTES,
                self.gpu.stream().cu_stream().cast(),
            )
        }
    }

    fn algorithm(
        &self,
        product: &Product,
        operation: &Operation,
        b: &Matrix,
        a: &Matrix,
        c: &Matrix,
    ) -> Result<Algorithm, CublasError> {
        let shape = (product.layout, product.output, product.m, product.n, product.k, product.pitch_c);
        let mut algorithms = self.algorithms.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(algorithm) = algorithms.get(&shape) {
            return Ok(*algorithm);
        }
        let preference = Preference::new()?;
        // SAFETY: all descriptors are alive.
        let found = unsafe { result::get_matmul_algo_heuristic(self.handle, operation.0, b.0, a.0, c.0, c.0, preference.0)? };
        algorithms.insert(shape, found.algo);
        Ok(found.algo)
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        // SAFETY: destroyed once, here.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

/// The shape of an operand.
struct Matrix(sys::cublasLtMatrixLayout_t);

impl Matrix {
    fn new(kind: sys::cudaDataType_t, rows: u64, columns: u64, pitch: usize) -> Result<Matrix, CublasError> {
        result::create_matrix_layout(kind, rows, columns, pitch as i64).map(Matrix)
    }
}

impl Drop for Matrix {
    fn drop(&mut self) {
        // SAFETY: destroyed once, here.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

/// Sums in f32, and what is transposed.
struct Operation(sys::cublasLtMatmulDesc_t);

impl Operation {
    fn new(transpose_first: bool, transpose_second: bool) -> Result<Operation, CublasError> {
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let operation = Operation(result::create_matmul_desc(compute, sys::cudaDataType_t::CUDA_R_32F)?);
        operation.set(sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA, transpose_first)?;
        operation.set(sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSB, transpose_second)?;
        Ok(operation)
    }

    fn set(&self, attribute: sys::cublasLtMatmulDescAttributes_t, transpose: bool) -> Result<(), CublasError> {
        let value = i32::from(transpose); // CUBLAS_OP_N is 0, CUBLAS_OP_T is 1
        // SAFETY: the library copies the four bytes.
        unsafe { result::set_matmul_desc_attribute(self.0, attribute, std::ptr::from_ref(&value).cast(), size_of::<i32>()) }
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        // SAFETY: destroyed once, here.
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

/// Algorithms that do not split k over blocks (a sum of parts in f32 would not be ours to order) and fit the workspace.
struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn new() -> Result<Preference, CublasError> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference = Preference(result::create_matmul_pref()?);
        let (workspace, no_split) = (WORKSPACE_BYTES as u64, 0u32);
        // SAFETY: the library copies the values, of the sizes that its manual gives.
        unsafe {
            let set =
                |attribute, value: *const c_void, bytes| result::set_matmul_pref_attribute(preference.0, attribute, value, bytes);
            set(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::ptr::from_ref(&workspace).cast(), size_of::<u64>())?;
            set(Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, std::ptr::from_ref(&no_split).cast(), size_of::<u32>())?;
        }
        Ok(preference)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: destroyed once, here.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}
