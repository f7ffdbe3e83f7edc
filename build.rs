//! Compiles the kernels of `cuda/` into the binary, for two worlds: with nvcc a fat binary per file for real GPUs; with GCC on
//! x86-64 Linux the emulated GPU and the same kernels for it. Where a compiler is missing the build goes on, and the binary says
//! at run time what it lacks and how to get it.
//!
//! Only what changed is compiled again: beside each output lies a stamp of its command and of the text of all its sources.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{env, fs};

/// A test's own kernels with planted faults, compiled for the emulated GPU only.
const PLANTED_FAULTS: &str = "tests/kernels/planted.cu";

/// What the emulated GPU puts in place of NVIDIA's libraries, under the names that programs look for, and its own sources; all
/// other files of `cuda/emulator` belong to the first.
const EMULATED_LIBRARIES: &[(&str, &[&str])] =
    &[("libcuda.so", &[]), ("libnccl.so", &["nccl.cpp", "nccl_operations.cpp"]), ("libcublasLt.so", &["cublaslt.cpp"])];

/// Kernels for the emulated GPU: every access to memory calls the emulator (the sanitizer's hooks), arrays have checked bounds,
/// nothing merges or vectorises accesses, so that they can be counted as a GPU would make them, and a call at a kernel's end stays a
/// call, so that its return address tells its line.
const EMULATED_KERNEL_FLAGS: &str = "-std=c++20 -x c++ -DLEARNER_EMULATOR -O2 -g1 -fPIC -fvisibility=hidden -fno-plt \
    -march=x86-64-v3 -ffp-contract=off -fsanitize=thread -fsanitize=bounds-strict --param tsan-instrument-func-entry-exit=0 \
    -fno-tree-vectorize -fno-tree-slp-vectorize -fno-store-merging -fno-tree-loop-distribute-patterns \
    -fno-optimize-sibling-calls -fno-exceptions -fno-rtti";
const EMULATOR_FLAGS: &str = "-std=c++20 -O2 -g1 -fPIC -fvisibility=hidden -march=x86-64-v3 -ffp-contract=off -pthread";

/// Ampere, Hopper and Blackwell as machine code; other cards of compute capability 8.0 and later compile the PTX when they load it.
/// `cuda/gate.py` reads the same file.
const GPU_FLAGS: &str = include_str!("cuda/nvcc.flags");
/// The first nvcc that knows all of these.
const NVCC_AT_LEAST: (u32, u32) = (12, 8);

fn main() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    for variable in ["CXX", "CUDA_HOME", "PATH"] {
        println!("cargo:rerun-if-env-changed={variable}");
    }
    for input in ["build.rs", "cuda", PLANTED_FAULTS] {
        println!("cargo:rerun-if-changed={input}");
    }
    let kernels = sources("cuda", "cu");

    let emulator = find_gcc();
    let nvcc = find_nvcc();
    let mut jobs = Vec::new();
    if let Ok(gcc) = &emulator {
        jobs.extend(emulator_sources().iter().map(|source| object(gcc, source, EMULATOR_FLAGS, &out)));
        jobs.extend(kernels.iter().map(|source| object(gcc, source, EMULATED_KERNEL_FLAGS, &out)));
        if Path::new(PLANTED_FAULTS).exists() {
            jobs.push(object(gcc, Path::new(PLANTED_FAULTS), EMULATED_KERNEL_FLAGS, &out));
        }
    }
    if let Ok(nvcc) = &nvcc {
        jobs.extend(kernels.iter().map(|source| fat_binary(nvcc, source, &out)));
    }
    run_all(&jobs);
    if let Ok(gcc) = &emulator {
        link_emulator(gcc, &kernels, &out);
    }
    write_if_changed(&out.join("embedded.rs"), &embedded(&kernels, emulator.err(), nvcc.err()));
}

// ---- compilers ----

/// GCC, or why there is none.
fn find_gcc() -> Result<PathBuf, String> {
    let target = ["CARGO_CFG_TARGET_ARCH", "CARGO_CFG_TARGET_OS"].map(|name| env::var(name).unwrap_or_default());
    if target != ["x86_64", "linux"] {
        return Err("the emulated GPU exists for x86-64 Linux only".to_string());
    }
    let candidates = env::var_os("CXX").into_iter().chain(["g++", "c++"].map(OsString::from)).map(PathBuf::from);
    let is_gcc = |path: &PathBuf| output_of(path, "--version").is_some_and(|text| text.contains("Free Software Foundation"));
    candidates.into_iter().find(is_gcc).ok_or_else(|| {
        "the emulated GPU needs GCC when learner is built, and neither CXX nor g++ nor c++ was that: install g++ and build again".to_string()
    })
}

/// nvcc, or why there is none.
fn find_nvcc() -> Result<PathBuf, String> {
    let home = env::var_os("CUDA_HOME").map(|home| Path::new(&home).join("bin/nvcc"));
    let candidates = home.into_iter().chain([PathBuf::from("nvcc"), PathBuf::from("/usr/local/cuda/bin/nvcc")]);
    let Some((nvcc, text)) = candidates.into_iter().find_map(|path| output_of(&path, "--version").map(|text| (path, text)))
    else {
        return Err("no kernels for real GPUs are in this binary: nvcc was not found when it was built (CUDA_HOME/bin, PATH, \
                    /usr/local/cuda/bin); install the CUDA toolkit 12.8 or later, or `pip install nvidia-cuda-nvcc`, and build again"
            .to_string());
    };
    let version = text.split("release ").nth(1).and_then(|rest| {
        let (major, rest) = rest.split_once('.')?;
        Some((major.parse().ok()?, rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()?))
    });
    match version {
        Some(version) if version < NVCC_AT_LEAST => Err(format!(
            "no kernels for real GPUs are in this binary: {} is of CUDA {}.{}, and {}.{} or later is needed",
            nvcc.display(),
            version.0,
            version.1,
            NVCC_AT_LEAST.0,
            NVCC_AT_LEAST.1
        )),
        _ => Ok(nvcc),
    }
}

fn output_of(program: &Path, argument: &str) -> Option<String> {
    let output = Command::new(program).arg(argument).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).into_owned())
}

// ---- what is made of what ----

/// One call of a compiler.
struct Job {
    program: PathBuf,
    arguments: Vec<OsString>,
    /// All files whose text decides the output.
    inputs: BTreeSet<PathBuf>,
    output: PathBuf,
}

fn words(flags: &str) -> Vec<OsString> {
    flags.split_whitespace().map(OsString::from).collect()
}

/// `cuda/emulator/driver.cpp` -> `OUT_DIR/emulator-driver.EXTENSION`
fn output_path(source: &Path, extension: &str, out: &Path) -> PathBuf {
    let parts: Vec<_> = [source.parent().and_then(Path::file_name), source.file_stem()].into_iter().flatten().collect();
    out.join(parts.join(std::ffi::OsStr::new("-"))).with_extension(extension)
}

fn object(gcc: &Path, source: &Path, flags: &str, out: &Path) -> Job {
    let output = output_path(source, "o", out);
    let arguments = words(flags).into_iter().chain(["-c".into(), source.into(), "-o".into(), output.clone().into()]).collect();
    Job { program: gcc.to_path_buf(), arguments, inputs: with_includes(source), output }
}

fn fat_binary(nvcc: &Path, source: &Path, out: &Path) -> Job {
    let output = output_path(source, "fatbin", out);
    let arguments = words(GPU_FLAGS).into_iter().chain([source.into(), "-o".into(), output.clone().into()]).collect();
    // Headers name the emulator's, which only the other compiler reads.
    let inputs = with_includes(source).into_iter().filter(|path| !path.starts_with("cuda/emulator")).collect();
    Job { program: nvcc.to_path_buf(), arguments, inputs, output }
}

fn shared_library(gcc: &Path, objects: &[PathBuf], flags: &[OsString], output: PathBuf) -> Job {
    let mut arguments = words("-shared -Wl,-z,now -Wl,-z,defs");
    arguments.extend(objects.iter().map(OsString::from));
    arguments.extend(flags.iter().cloned());
    arguments.extend(["-o".into(), output.clone().into()]);
    Job { program: gcc.to_path_buf(), arguments, inputs: objects.iter().cloned().collect(), output }
}

/// The files of a folder with an extension, by name.
fn sources(folder: &str, extension: &str) -> Vec<PathBuf> {
    let mut sources: Vec<PathBuf> = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    sources.retain(|path| path.extension().is_some_and(|found| found == extension));
    sources.sort();
    sources
}

fn emulator_sources() -> Vec<PathBuf> {
    sources("cuda/emulator", "cpp")
}

/// The emulated libraries, then the kernels, which call the first of them.
fn link_emulator(gcc: &Path, kernels: &[PathBuf], out: &Path) {
    let elsewhere: Vec<&str> = EMULATED_LIBRARIES.iter().flat_map(|(_, own)| own.iter().copied()).collect();
    let file_name = |path: &PathBuf| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    for (name, own) in EMULATED_LIBRARIES {
        let belongs = |path: &PathBuf| {
            if own.is_empty() { !elsewhere.contains(&&*file_name(path)) } else { own.contains(&&*file_name(path)) }
        };
        let objects: Vec<PathBuf> =
            emulator_sources().iter().filter(|path| belongs(path)).map(|path| output_path(path, "o", out)).collect();
        let mut flags = words(&format!("-Wl,-soname,{name} -static-libstdc++ -static-libgcc -Wl,--exclude-libs,ALL -pthread"));
        if !own.is_empty() {
            flags.extend(linked_to_the_driver(out));
        }
        run_all(&[shared_library(gcc, &objects, &flags, out.join(name))]);
    }
    let mut flags = words("-nostdlib");
    flags.extend(linked_to_the_driver(out));
    flags.extend(words("-lm -lc"));
    let objects: Vec<PathBuf> = kernels.iter().map(|kernel| output_path(kernel, "o", out)).collect();
    let mut jobs = vec![shared_library(gcc, &objects, &flags, out.join("kernels.so"))];
    if Path::new(PLANTED_FAULTS).exists() {
        let object = output_path(Path::new(PLANTED_FAULTS), "o", out);
        jobs.push(shared_library(gcc, &[object], &flags, out.join("planted.so")));
    }
    run_all(&jobs);
}

fn linked_to_the_driver(out: &Path) -> [OsString; 3] {
    ["-L".into(), out.into(), "-lcuda".into()]
}

/// A source and, over and over, what it includes by `#include "..."`.
fn with_includes(source: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    let mut waiting = vec![source.to_path_buf()];
    while let Some(path) = waiting.pop() {
        let text = fs::read_to_string(&path).unwrap_or_else(|error| fail(&format!("{}: {error}", path.display())));
        let names = text.lines().filter_map(|line| line.trim_start().strip_prefix("#include \"")?.split('"').next());
        let folder = path.parent().unwrap_or(Path::new(""));
        waiting.extend(names.map(|name| simplified(&folder.join(name))).filter(|include| !found.contains(include)));
        found.insert(path);
    }
    found
}

/// `a/b/../c` -> `a/c`
fn simplified(path: &Path) -> PathBuf {
    let mut simple = PathBuf::new();
    for part in path.components() {
        if part.as_os_str() != ".." || !simple.pop() {
            simple.push(part);
        }
    }
    simple
}

// ---- running ----

/// Runs the jobs whose stamp is not that of their output, as many at once as cargo allows.
fn run_all(jobs: &[Job]) {
    let at_once = env::var("NUM_JOBS").ok().and_then(|number| number.parse().ok()).unwrap_or(1).min(jobs.len());
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    run(job);
                }
            });
        }
    });
}

fn run(job: &Job) {
    let stamp_path = PathBuf::from(format!("{}.stamp", job.output.display()));
    let stamp = stamp(job);
    if job.output.exists() && fs::read_to_string(&stamp_path).is_ok_and(|old| old == stamp) {
        return;
    }
    let result = Command::new(&job.program).args(&job.arguments).output();
    let output = result.unwrap_or_else(|error| fail(&format!("{}: {error}", job.program.display())));
    if !output.status.success() {
        let message = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
        fail(&format!("{} could not make {}:\n{message}", job.program.display(), job.output.display()));
    }
    write_if_changed(&stamp_path, &stamp);
}

fn stamp(job: &Job) -> String {
    let mut hasher = DefaultHasher::new();
    (&job.program, output_of(&job.program, "--version"), &job.arguments).hash(&mut hasher);
    for input in &job.inputs {
        (input, fs::read(input).unwrap_or_default()).hash(&mut hasher);
    }
    format!("{:016x}", hasher.finish())
}

fn write_if_changed(path: &Path, text: &str) {
    if fs::read_to_string(path).is_ok_and(|old| old == text) {
        return;
    }
    fs::write(path, text).unwrap_or_else(|error| fail(&format!("{}: {error}", path.display())));
}

fn fail(message: &str) -> ! {
    eprintln!("{message}");
    std::process::exit(1)
}

// ---- what the binary carries ----

/// The text of `OUT_DIR/embedded.rs`: see `src/device/cuda/embedded.rs`.
fn embedded(kernels: &[PathBuf], no_emulator: Option<String>, no_nvcc: Option<String>) -> String {
    let bytes = |name: &str| format!("include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{name}\"))");
    let entry = |name: &str| format!("    ({name:?}, {} as &[u8]),\n", bytes(name));
    let table = |present: bool, entries: String| if present { format!("&[\n{entries}]") } else { "&[]".to_string() };
    let fat_binaries: String =
        kernels.iter().map(|kernel| entry(&output_path(kernel, "fatbin", Path::new("")).to_string_lossy())).collect();
    let libraries: String = EMULATED_LIBRARIES.iter().map(|(name, _)| entry(name)).collect();
    let type_of_tables = "&[(&str, &[u8])]";
    format!(
        "pub static FAT_BINARIES: {type_of_tables} = {};\n\
         pub const NO_FAT_BINARIES: Option<&str> = {no_nvcc:?};\n\
         pub static EMULATED_LIBRARIES: {type_of_tables} = {};\n\
         pub static EMULATED_KERNELS: {type_of_tables} = {};\n\
         pub const NO_EMULATOR: Option<&str> = {no_emulator:?};\n",
        table(no_nvcc.is_none(), fat_binaries),
        table(no_emulator.is_none(), libraries),
        table(no_emulator.is_none(), entry("kernels.so")),
    )
}
