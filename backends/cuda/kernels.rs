//! The image of kernels: what is embedded, and the functions of the image that a device has loaded.
//!
//! All functions are asked for when the device is opened: drivers load a kernel when it is first asked for, which a capture that records
//! does not survive. One that the image lacks is an operation that is refused by name.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ffi::{CString, OsStr, c_void};
use std::fmt::Write as _;
use std::path::Path;
use std::ptr;
use std::rc::Rc;

use cudarc::driver::sys::{self, CUfunction, CUfunction_attribute, CUmodule, CUresult};

use super::BACKEND;
use super::args::Args;
use super::context::Context;
use super::driver::{self, DriverError, call};
use super::graph::CudaStream;
use crate::backend::{BackendError, Result};
use crate::quant::QuantType;

/// Names a file with another image, e.g. one built elsewhere, or the library that the look-alike driver takes for one.
pub const IMAGE_VARIABLE: &str = "EBBTIDE_CUDA_IMAGE";

/// What the driver reads as numbers begins where these may.
#[repr(C, align(16))]
struct Aligned<T: ?Sized>(T);

static EMBEDDED: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/ebbtide.fatbin")));

/// Kernels with one name.
const PLAIN: &[&str] = &[
    "add_gated",
    "count_routes",
    "attention_prompt_f16",
    "attention_prompt_f32",
    "attention_prompt_q8_0",
    "attention_tiles_f16_128",
    "attention_tiles_f16_256",
    "attention_tiles_f16_64",
    "attention_tiles_q8_0_128",
    "attention_tiles_q8_0_256",
    "attention_tiles_q8_0_64",
    "attention_window_f16",
    "attention_window_f16_128",
    "attention_window_f16_256",
    "attention_window_f16_64",
    "attention_window_f32",
    "attention_window_join",
    "attention_window_q8_0",
    "attention_window_q8_0_128",
    "attention_window_q8_0_256",
    "attention_window_q8_0_64",
    "delta_conv",
    "delta_conv_4",
    "delta_gates",
    "delta_history",
    "delta_rule",
    "delta_rule_128",
    "experts_activate",
    "experts_add",
    "experts_gated_128",
    "experts_gated_32",
    "experts_gated_64",
    "experts_halves_128",
    "experts_halves_32",
    "experts_halves_64",
    "experts_window_add",
    "gated_head_norm",
    "head_norm_rope",
    "join_rows",
    "kv_store",
    "mat_mul_halves_128",
    "mat_mul_halves_32",
    "mat_mul_halves_64",
    "norm_quantise",
    "place_routes",
    "quantise",
    "quantise_halves",
    "rms_norm",
    "router",
    "sigmoid_gate",
    "split_gates",
    "store_heads",
    "swiglu",
    "window_activate",
    "window_floats_bf16",
    "window_floats_f16",
    "window_floats_f32",
];
/// Kernels with a variant for each element type, whose name follows theirs.
const BY_TYPE: &[&str] = &["experts_prompt", "experts_window", "mat_mul_prompt", "mat_mul_window", "unpack"];

/// Kernels with a variant for each quantised type.
const BY_QUANTISED_TYPE: &[&str] =
    &["window_down", "window_down_one", "window_gate_up", "window_gate_up_one", "window_products", "window_products_one"];

/// Which kernel: one of a name, or its variant for an element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kernel(pub &'static str, pub Option<QuantType>);

impl Kernel {
    /// Its name in the image.
    fn name(self) -> String {
        let mut name = self.0.to_owned();
        if let Some(quant_type) = self.1 {
            write!(name, "_{quant_type}").expect("a text takes any text");
        }
        name.to_lowercase()
    }

    fn all() -> impl Iterator<Item = Self> {
        let variants = |name: &'static str| QuantType::ALL.into_iter().map(move |quant_type| Self(name, Some(quant_type)));
        let by_type = BY_TYPE.iter().copied().flat_map(variants);
        let quantised = |kernel: &Self| kernel.1.is_some_and(|quant_type| !quant_type.is_float());
        let by_quantised_type = BY_QUANTISED_TYPE.iter().copied().flat_map(variants).filter(quantised);
        PLAIN.iter().map(|name| Self(name, None)).chain(by_type).chain(by_quantised_type)
    }
}

/// How many threads run a kernel: blocks, and threads in each.
#[derive(Clone, Copy, Debug)]
pub struct Grid {
    /// Blocks.
    pub blocks: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
}

/// The kernels of a device; unloaded on drop.
pub struct Kernels {
    context: Rc<Context>,
    module: CUmodule,
    functions: HashMap<Kernel, CUfunction>,
}

/// The image, or why there is none.
fn image(named: Option<&OsStr>) -> std::result::Result<Cow<'static, [u8]>, String> {
    if let Some(path) = named.filter(|path| !path.is_empty()) {
        let path = Path::new(path);
        let mut image = std::fs::read(path).map_err(|error| format!("{IMAGE_VARIABLE} names {}: {error}", path.display()))?;
        // The driver is not told how long an image is. PTX ends in a zero, and what is no image at all ends here at the latest.
        image.extend_from_slice(&[0; 64]);
        return Ok(Cow::Owned(image));
    }
    if EMBEDDED.0.is_empty() {
        return Err(format!(
            "this program was built without CUDA kernels, because nvcc was not found or failed: build it again with NVCC or CUDA_HOME \
             naming the compiler (CUDA 12.8 or later), or let {IMAGE_VARIABLE} name an image"
        ));
    }
    Ok(Cow::Borrowed(&EMBEDDED.0))
}

/// Says that the image holds nothing for the card, with both architectures.
fn not_for_this_card(context: &Context, error: DriverError) -> String {
    let (of_card, wanted) = match driver::compute_capability(context.device()) {
        Ok(version) => (format!("of compute capability {version}"), format!("{}{}", version.major, version.minor)),
        Err(_) => ("or driver".to_owned(), "the card's".to_owned()),
    };
    let built = match option_env!("EBBTIDE_BUILT_ARCHS") {
        Some(archs) if std::env::var_os(IMAGE_VARIABLE).is_none() => format!(", but for {archs}"),
        _ => String::new(),
    };
    format!(
        "the kernels were not built for this card {of_card}{built} ({error}): build with EBBTIDE_CUDA_ARCHS={wanted}, and where the driver \
         is older than the compiler, update NVIDIA's driver"
    )
}

impl Kernels {
    /// Loads the image and finds its kernels; the context is current.
    ///
    /// # Errors
    /// What is wrong with the image, in words.
    pub fn load(context: &Rc<Context>) -> std::result::Result<Self, String> {
        let image = image(std::env::var_os(IMAGE_VARIABLE).as_deref())?;
        let mut module = ptr::null_mut();
        // SAFETY: the context is current; `module` is a place for one handle; the driver takes the image's own word for its length, which
        // whoever built or named the image answers for.
        unsafe { call!(cuModuleLoadData(&raw mut module, image.as_ptr().cast())) }.map_err(|error| match error.code {
            CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU | CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => not_for_this_card(context, error),
            _ => format!("the kernels cannot be loaded: {error}"),
        })?;
        let mut kernels = Self { context: Rc::clone(context), module, functions: HashMap::new() };
        for kernel in Kernel::all() {
            if let Some(function) = kernels.find(kernel).map_err(|error| format!("{}: {error}", kernel.name()))? {
                kernels.functions.insert(kernel, function);
            }
        }
        Ok(kernels)
    }

    /// Bytes of local memory that a thread of the most demanding kernel has.
    ///
    /// # Errors
    /// The driver's.
    pub fn local_bytes_max(&self) -> std::result::Result<u64, DriverError> {
        let mut most = 0;
        for &function in self.functions.values() {
            let mut bytes = 0;
            // SAFETY: the module lives, and with it its functions; `bytes` is a place for one number.
            unsafe { call!(cuFuncGetAttribute(&raw mut bytes, CUfunction_attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, function)) }?;
            most = most.max(u64::try_from(bytes).unwrap_or(0));
        }
        Ok(most)
    }

    fn find(&self, kernel: Kernel) -> std::result::Result<Option<CUfunction>, DriverError> {
        let name = CString::new(kernel.name()).expect("a name without zeros");
        let mut function = ptr::null_mut();
        // SAFETY: the module lives; `function` is a place for one handle; the name ends in a zero.
        match unsafe { call!(cuModuleGetFunction(&raw mut function, self.module, name.as_ptr())) } {
            Ok(()) => Ok(Some(function)),
            Err(DriverError { code: CUresult::CUDA_ERROR_NOT_FOUND, .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Queues a kernel on a stream.
    ///
    /// # Safety
    /// The addresses in `args` are live until the queued kernel has run, in the extent and with the access that the kernel's source says,
    /// and nothing else writes what it reads meanwhile.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] for a kernel that the image lacks, else the driver's.
    pub unsafe fn queue<A: Args>(&self, stream: &CudaStream, kernel: Kernel, grid: Grid, args: &A) -> Result<()> {
        let Some(&function) = self.functions.get(&kernel) else {
            let what = format!("the operation {}, whose kernel the image lacks", kernel.name());
            return Err(BackendError::Unsupported { backend: BACKEND, what });
        };
        let mut bytes = size_of::<A>();
        // With its length, so that a driver refuses arguments of another size than the kernel's.
        let mut packed = [
            ptr::without_provenance_mut::<c_void>(BUFFER_POINTER),
            ptr::from_ref(args).cast_mut().cast(),
            ptr::without_provenance_mut(BUFFER_BYTES),
            (&raw mut bytes).cast(),
            ptr::null_mut(),
        ];
        let [x, y, z] = grid.blocks;
        // SAFETY: function and stream live, in the context that is current; the driver copies the arguments before it returns; they are
        // the kernel's by `Args`, and what they point to is the caller's promise.
        let queued =
            unsafe { call!(cuLaunchKernel(function, x, y, z, grid.threads, 1, 1, 0, stream.raw(), ptr::null_mut(), packed.as_mut_ptr())) };
        self.context.told(queued)
    }
}

/// `CU_LAUNCH_PARAM_BUFFER_POINTER` and `CU_LAUNCH_PARAM_BUFFER_SIZE`: numbers that the driver takes as addresses.
const BUFFER_POINTER: usize = 1;
const BUFFER_BYTES: usize = 2;

impl Drop for Kernels {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: the context is current; the module lives and this is its last use, after the work that may run its kernels. An error
            // leaves nothing to do.
            let _ = unsafe { (sys::cuCtxSynchronize(), sys::cuModuleUnload(self.module)) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variant_is_called_by_its_operation_and_type() {
        assert_eq!(Kernel("rms_norm", None).name(), "rms_norm");
        assert_eq!(Kernel("mat_mul_window", Some(QuantType::IQ3_XXS)).name(), "mat_mul_window_iq3_xxs");
    }

    #[test]
    fn an_image_that_cannot_be_read_is_named_with_its_variable() {
        let reason = image(Some(OsStr::new("/no/such/image"))).expect_err("there is none");
        assert!(reason.starts_with("EBBTIDE_CUDA_IMAGE names /no/such/image: "), "{reason}");
        if EMBEDDED.0.is_empty() {
            let reason = image(None).expect_err("there is none");
            assert!(reason.contains("NVCC or CUDA_HOME"), "{reason}");
        }
    }
}
