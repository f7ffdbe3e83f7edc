// cuBLASLt's matrix product (libcublasLt.so): D = alpha op(A) op(B) + beta C for bf16 A and B, bf16 or f32 C and D, summed in f32
// over k ascending. Anything else is refused as not supported.

#include "driver.h"

#include <cstring>
#include <string>

namespace emulator::cublaslt {

enum Status : int32_t {
    SUCCESS = 0,
    NOT_INITIALIZED = 1,
    INVALID_VALUE = 7,
    EXECUTION_FAILED = 13,
    NOT_SUPPORTED = 15,
};

// cudaDataType_t, cublasComputeType_t, cublasOperation_t, cublasLtOrder_t
constexpr int32_t FLOAT32 = 0, BFLOAT16 = 14;
constexpr int32_t COMPUTE_FLOAT32 = 68, COMPUTE_FLOAT32_PEDANTIC = 69;
constexpr int32_t NOT_TRANSPOSED = 0, TRANSPOSED = 1;
constexpr int32_t COLUMN_MAJOR = 0, ROW_MAJOR = 1;

struct Layout {
    int32_t type;
    int32_t order = COLUMN_MAJOR;
    uint64_t rows, columns;
    int64_t leading; // elements from one column (row) to the next in column (row) major order
    int32_t batches = 1;
    int64_t batch_stride = 0;

    size_t bytes() const { return type == FLOAT32 ? 4 : 2; }
    int64_t offset(int64_t row, int64_t column) const {
        return order == ROW_MAJOR ? row * leading + column : column * leading + row;
    }
    // Columns (rows) that lie in one piece, and their length.
    int64_t lines() const { return int64_t(order == ROW_MAJOR ? rows : columns); }
    int64_t line() const { return int64_t(order == ROW_MAJOR ? columns : rows); }
};

struct Product {
    int32_t compute_type;
    int32_t scale_type;
    int32_t pointer_mode = 0; // alpha and beta on the host
    int32_t transposed_a = NOT_TRANSPOSED, transposed_b = NOT_TRANSPOSED, transposed_c = NOT_TRANSPOSED;
    int32_t epilogue = 1; // none
};

struct Preference {
    uint64_t workspace_bytes = 0;
};

struct Algorithm {
    uint64_t data[8];
};

struct HeuristicResult {
    Algorithm algorithm;
    size_t workspace_bytes;
    int32_t status;
    float waves;
    int32_t reserved[4];
};
static_assert(sizeof(HeuristicResult) == 96);

static float load(const Layout& layout, const void* matrix, int64_t row, int64_t column) {
    const int64_t index = layout.offset(row, column);
    if (layout.type == FLOAT32) return static_cast<const float*>(matrix)[index];
    const uint32_t bits = uint32_t(static_cast<const uint16_t*>(matrix)[index]) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

static void store(const Layout& layout, void* matrix, int64_t row, int64_t column, float value) {
    const int64_t index = layout.offset(row, column);
    if (layout.type == FLOAT32) {
        static_cast<float*>(matrix)[index] = value;
        return;
    }
    uint32_t bits; // round to nearest, ties to even
    std::memcpy(&bits, &value, sizeof bits);
    const bool is_nan = value != value;
    static_cast<uint16_t*>(matrix)[index] = uint16_t(is_nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// op(matrix) as [rows, columns] floats, row-major
static std::vector<float> widen(const Layout& layout, const void* matrix, bool transposed) {
    const auto rows = int64_t(transposed ? layout.columns : layout.rows);
    const auto columns = int64_t(transposed ? layout.rows : layout.columns);
    std::vector<float> values(size_t(rows * columns));
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t column = 0; column < columns; ++column) {
            float& value = values[size_t(row * columns + column)];
            value = transposed ? load(layout, matrix, column, row) : load(layout, matrix, row, column);
        }
    }
    return values;
}

struct Task {
    Product product;
    Layout a, b, c, d;
    const void* a_values;
    const void* b_values;
    const void* c_values;
    void* d_values;
    float alpha, beta;
};

// Why a product cannot be computed here; SUCCESS if it can.
static Status judge(const Product& product, const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
    const bool ta = product.transposed_a == TRANSPOSED, tb = product.transposed_b == TRANSPOSED;
    const uint64_t m = ta ? a.columns : a.rows, n = tb ? b.rows : b.columns, k = ta ? a.rows : a.columns;
    if (k != (tb ? b.columns : b.rows) || d.rows != m || d.columns != n || c.rows != m || c.columns != n) return INVALID_VALUE;
    for (const Layout* layout : {&a, &b, &c, &d}) {
        if (layout->rows == 0 || layout->columns == 0 || layout->leading < layout->line()) return INVALID_VALUE;
        if (layout->batches != 1 || layout->order < COLUMN_MAJOR || layout->order > ROW_MAJOR) return NOT_SUPPORTED;
    }
    const bool types = a.type == BFLOAT16 && b.type == BFLOAT16 && (d.type == BFLOAT16 || d.type == FLOAT32) && c.type == d.type;
    const bool compute = product.compute_type == COMPUTE_FLOAT32 || product.compute_type == COMPUTE_FLOAT32_PEDANTIC;
    const bool transposes = product.transposed_a <= TRANSPOSED && product.transposed_b <= TRANSPOSED &&
                            product.transposed_c == NOT_TRANSPOSED;
    const bool plain = product.scale_type == FLOAT32 && product.pointer_mode == 0 && product.epilogue == 1;
    return types && compute && transposes && plain ? SUCCESS : NOT_SUPPORTED;
}

static bool check(const Layout& layout, const void* matrix, bool written, const char* what) {
    for (int64_t line = 0; line < layout.lines(); ++line) { // what lies between the lines is nobody's business
        char* start = const_cast<char*>(static_cast<const char*>(matrix)) + line * layout.leading * int64_t(layout.bytes());
        const size_t bytes = size_t(layout.line()) * layout.bytes();
        if (!(written ? mark_written(start, bytes, what) : check_readable(start, bytes, what))) return false;
    }
    return true;
}

// False after a finding.
static bool multiply(const Task& task) {
    if (!check(task.a, task.a_values, false, "cublasLtMatmul (A)")) return false;
    if (!check(task.b, task.b_values, false, "cublasLtMatmul (B)")) return false;
    if (task.beta != 0 && !check(task.c, task.c_values, false, "cublasLtMatmul (C)")) return false;
    if (!check(task.d, task.d_values, true, "cublasLtMatmul (D)")) return false;
    const std::vector<float> a = widen(task.a, task.a_values, task.product.transposed_a == TRANSPOSED); // [m, k]
    const std::vector<float> b = widen(task.b, task.b_values, task.product.transposed_b == TRANSPOSED); // [k, n]
    const auto m = int64_t(task.d.rows), n = int64_t(task.d.columns), k = int64_t(a.size()) / m;
    std::vector<float> sums(size_t(n), 0.0f);
    for (int64_t row = 0; row < m; ++row) {
        std::fill(sums.begin(), sums.end(), 0.0f);
        for (int64_t i = 0; i < k; ++i) {
            const float factor = a[size_t(row * k + i)];
            const float* values = &b[size_t(i * n)];
            for (int64_t column = 0; column < n; ++column) sums[size_t(column)] += factor * values[column];
        }
        for (int64_t column = 0; column < n; ++column) {
            float value = task.alpha * sums[size_t(column)];
            if (task.beta != 0) value += task.beta * load(task.c, task.c_values, row, column);
            store(task.d, task.d_values, row, column, value);
        }
    }
    return true;
}

// Sets a field from the caller's bytes.
template <class T> static Status assign(T& field, const void* value, size_t bytes) {
    if (!value || bytes < sizeof(T)) return INVALID_VALUE;
    std::memcpy(&field, value, sizeof(T));
    return SUCCESS;
}

} // namespace emulator::cublaslt

using namespace emulator::cublaslt;

#pragma GCC visibility push(default)
extern "C" {

int32_t cublasLtCreate(void** handle) {
    emulator::driver::Device* device;
    if (emulator::driver::open_device(device)) return NOT_INITIALIZED;
    *handle = new char; // only an identity: streams and contexts carry all state
    return SUCCESS;
}

int32_t cublasLtDestroy(void* handle) {
    delete static_cast<char*>(handle);
    return SUCCESS;
}

int32_t cublasLtMatrixLayoutCreate(Layout** layout, int32_t type, uint64_t rows, uint64_t columns, int64_t leading) {
    *layout = new Layout{type, COLUMN_MAJOR, rows, columns, leading};
    return SUCCESS;
}

int32_t cublasLtMatrixLayoutDestroy(Layout* layout) {
    delete layout;
    return SUCCESS;
}

int32_t cublasLtMatrixLayoutSetAttribute(Layout* layout, int32_t attribute, const void* value, size_t bytes) {
    switch (attribute) {
    case 0: return assign(layout->type, value, bytes);
    case 1: return assign(layout->order, value, bytes);
    case 2: return assign(layout->rows, value, bytes);
    case 3: return assign(layout->columns, value, bytes);
    case 4: return assign(layout->leading, value, bytes);
    case 5: return assign(layout->batches, value, bytes);
    case 6: return assign(layout->batch_stride, value, bytes);
    default: return NOT_SUPPORTED;
    }
}

int32_t cublasLtMatmulDescCreate(Product** product, int32_t compute_type, int32_t scale_type) {
    *product = new Product{compute_type, scale_type};
    return SUCCESS;
}

int32_t cublasLtMatmulDescDestroy(Product* product) {
    delete product;
    return SUCCESS;
}

int32_t cublasLtMatmulDescSetAttribute(Product* product, int32_t attribute, const void* value, size_t bytes) {
    switch (attribute) {
    case 0: return assign(product->compute_type, value, bytes);
    case 1: return assign(product->scale_type, value, bytes);
    case 2: return assign(product->pointer_mode, value, bytes);
    case 3: return assign(product->transposed_a, value, bytes);
    case 4: return assign(product->transposed_b, value, bytes);
    case 5: return assign(product->transposed_c, value, bytes);
    case 7: return assign(product->epilogue, value, bytes);
    default: return NOT_SUPPORTED;
    }
}

int32_t cublasLtMatmulPreferenceCreate(Preference** preference) {
    *preference = new Preference;
    return SUCCESS;
}

int32_t cublasLtMatmulPreferenceDestroy(Preference* preference) {
    delete preference;
    return SUCCESS;
}

int32_t cublasLtMatmulPreferenceSetAttribute(Preference* preference, int32_t attribute, const void* value, size_t bytes) {
    return attribute == 1 ? assign(preference->workspace_bytes, value, bytes) : SUCCESS; // the others narrow a choice of one
}

int32_t cublasLtMatmulAlgoGetHeuristic(void* handle, const Product* product, const Layout* a, const Layout* b, const Layout* c,
                                       const Layout* d, const Preference* preference, int32_t wanted,
                                       HeuristicResult* results, int32_t* found) {
    if (!handle || !product || !a || !b || !c || !d || !preference || wanted < 1) return INVALID_VALUE;
    *found = 0;
    if (const Status status = judge(*product, *a, *b, *c, *d)) return status;
    results[0] = {};
    results[0].waves = 1.0f;
    *found = 1;
    return SUCCESS;
}

int32_t cublasLtMatmul(void* handle, const Product* product, const float* alpha, const void* a_values, const Layout* a,
                       const void* b_values, const Layout* b, const float* beta, const void* c_values, const Layout* c,
                       void* d_values, const Layout* d, const Algorithm*, void*, size_t, void* stream_handle) {
    if (!handle || !product || !alpha || !beta || !a || !b || !c || !d) return INVALID_VALUE;
    if (!a_values || !b_values || !c_values || !d_values) return INVALID_VALUE;
    if (const Status status = judge(*product, *a, *b, *c, *d)) return status;
    std::shared_ptr<emulator::driver::Stream> stream;
    if (emulator::driver::open_stream(stream_handle, stream)) return EXECUTION_FAILED;
    const Task task{*product, *a, *b, *c, *d, a_values, b_values, c_values, d_values, *alpha, *beta};
    emulator::driver::enqueue(stream, [task, &device = stream->device] {
        if (!multiply(task)) device.lost = true;
    });
    return SUCCESS;
}

} // extern "C"
#pragma GCC visibility pop
