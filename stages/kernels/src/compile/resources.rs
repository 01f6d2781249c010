//! What `ptxas -v` says each kernel takes of a multiprocessor.

use super::KernelResources;
use super::names::demangle;

/// The kernels of a log, in its order.
pub fn resources(log: &str) -> Vec<KernelResources> {
    by_symbol(log).into_iter().map(|(_, kernel)| kernel).collect()
}

/// The same with their symbols. Device functions that were not inlined are left out: they are no kernels.
pub fn by_symbol(log: &str) -> Vec<(String, KernelResources)> {
    let mut kernels: Vec<(String, KernelResources)> = Vec::new();
    let mut described = "";
    for line in log.lines() {
        if let Some(symbol) = quoted_after(line, "Compiling entry function '") {
            kernels.push((symbol.to_owned(), unused(demangle(symbol))));
        } else if let Some((_, symbol)) = line.split_once("Function properties for ") {
            described = symbol.trim();
        } else if let Some((symbol, kernel)) = kernels.last_mut() {
            if line.contains("bytes stack frame") && described == symbol {
                read_stack(line, kernel);
            } else if line.contains("Used ") && line.contains(" registers") {
                read_use(line, kernel);
            }
        }
    }
    kernels
}

fn unused(kernel: String) -> KernelResources {
    KernelResources { kernel, registers: 0, shared_bytes: 0, local_bytes: 0, spill_store_bytes: 0, spill_load_bytes: 0 }
}

fn read_stack(line: &str, kernel: &mut KernelResources) {
    kernel.local_bytes = number_before(line, " bytes stack frame");
    kernel.spill_store_bytes = number_before(line, " bytes spill stores");
    kernel.spill_load_bytes = number_before(line, " bytes spill loads");
}

fn read_use(line: &str, kernel: &mut KernelResources) {
    kernel.registers = number_before(line, " registers");
    kernel.shared_bytes = number_before(line, " bytes smem");
}

/// What is not mentioned is not used.
fn number_before(line: &str, unit: &str) -> u32 {
    let before = line.split_once(unit).map(|(before, _)| before);
    before.and_then(|before| before.rsplit([' ', ',', ':']).next()).and_then(|number| number.parse().ok()).unwrap_or(0)
}

fn quoted_after<'a>(line: &'a str, start: &str) -> Option<&'a str> {
    line.split_once(start)?.1.split_once('\'').map(|(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_is_told_from_its_functions() {
        let log = "ptxas info    : Compiling entry function '_Z4reluPKfPf' for 'sm_90'\n\
            ptxas info    : Function properties for helper\n    64 bytes stack frame, 1 bytes spill stores, 2 bytes spill loads\n\
            ptxas info    : Function properties for _Z4reluPKfPf\nptxas         .     16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads\n\
            ptxas info    : Used 255 registers, used 1 barriers, 4096 bytes smem, 368 bytes cmem[0]\n";
        let expected = KernelResources {
            kernel: "relu".to_owned(),
            registers: 255,
            shared_bytes: 4096,
            local_bytes: 16,
            spill_store_bytes: 12,
            spill_load_bytes: 8,
        };
        assert_eq!(resources(log), [expected]);
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_read(log in "(?s)(Compiling entry function 'k'|Used |registers|[0-9]{1,12}| bytes smem|.|\n){0,60}") {
            resources(&log);
        }
    }
}
