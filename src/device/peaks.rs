//! What known GPUs can do at most: the denominators of every printed share. A GPU that is not in this table has no share.

/// The published peaks of one device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peaks {
    /// Dense bf16 products with f32 accumulation, in FLOP per second.
    pub tensor_flops: f64,
    /// Device memory, in bytes per second.
    pub memory_bytes: f64,
}

/// By the name that the driver gives, whole: variants of one chip differ in clocks and memory. From NVIDIA's data sheets,
/// without sparsity.
const KNOWN: &[(&str, Peaks)] = &[
    ("NVIDIA H200", Peaks { tensor_flops: 989e12, memory_bytes: 4.8e12 }),
    ("NVIDIA H100 80GB HBM3", Peaks { tensor_flops: 989e12, memory_bytes: 3.35e12 }),
    ("NVIDIA A100-SXM4-40GB", Peaks { tensor_flops: 312e12, memory_bytes: 1.555e12 }),
    ("NVIDIA A100-SXM4-80GB", Peaks { tensor_flops: 312e12, memory_bytes: 2.039e12 }),
    ("NVIDIA A100-PCIE-40GB", Peaks { tensor_flops: 312e12, memory_bytes: 1.555e12 }),
    ("NVIDIA A100 80GB PCIe", Peaks { tensor_flops: 312e12, memory_bytes: 1.935e12 }),
];

impl Peaks {
    /// The peaks of the GPU that the driver calls `name`; `None` if nobody has entered it.
    pub fn of(name: &str) -> Option<Peaks> {
        KNOWN.iter().find(|(known, _)| *known == name).map(|&(_, peaks)| peaks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_very_card_has_peaks() {
        assert_eq!(Peaks::of("NVIDIA H200"), Some(Peaks { tensor_flops: 989e12, memory_bytes: 4.8e12 }));
        for unknown in ["", "NVIDIA H200 NVL", "NVIDIA H100 PCIe", "Emulated GPU", "H200"] {
            assert_eq!(Peaks::of(unknown), None, "{unknown}");
        }
    }
}
