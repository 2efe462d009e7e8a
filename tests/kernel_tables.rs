//! Goal: the tables that device code decodes weights with are those of `quant::tables`. Method: `kernels-cuda/quant_tables.cuh` is written
//! from them; this test writes it anew and compares. `EBBTIDE_RENEW=1 cargo test --test kernel_tables` stores what it wrote.

use std::fmt::{Display, Write as _};
use std::path::Path;

use ebbtide::quant::tables::{IQ1_GRID, IQ2_S_GRID, IQ2_XS_GRID, IQ2_XXS_GRID, IQ3_S_GRID, IQ3_XXS_GRID, IQ4_VALUES, MXFP4_VALUES};

const HEAD: &str = "// Tables of the quantised types: those of src/quant/tables, from which tests/kernel_tables.rs writes this file.\n\
    #pragma once\n\n#include \"portable.cuh\"\n";

/// One table, lines filled up to the width of our sources.
fn table(out: &mut String, of: &str, name: &str, entries: impl ExactSizeIterator<Item = impl Display>) {
    write!(out, "\nCONSTANT {of} {name}[{}] = {{", entries.len()).expect("a string takes all");
    let mut width = usize::MAX;
    for entry in entries {
        let entry = format!("{entry},");
        if width.saturating_add(1 + entry.len()) > 138 {
            out.push_str("\n   ");
            width = 3;
        }
        width += 1 + entry.len();
        write!(out, " {entry}").expect("a string takes all");
    }
    out.push_str("\n};\n");
}

fn wide(grid: &[u64]) -> impl ExactSizeIterator<Item = String> {
    grid.iter().map(|entry| format!("{entry:#018x}"))
}

fn narrow(grid: &[u32]) -> impl ExactSizeIterator<Item = String> {
    grid.iter().map(|entry| format!("{entry:#010x}"))
}

#[test]
fn device_code_has_the_tables_of_the_host() {
    let mut text = HEAD.to_owned();
    table(&mut text, "int8_t", "IQ4_VALUES", IQ4_VALUES.iter());
    table(&mut text, "int8_t", "MXFP4_VALUES", MXFP4_VALUES.iter());
    table(&mut text, "uint64_t", "IQ2_XXS_GRID", wide(&IQ2_XXS_GRID));
    table(&mut text, "uint64_t", "IQ2_XS_GRID", wide(&IQ2_XS_GRID));
    table(&mut text, "uint64_t", "IQ2_S_GRID", wide(&IQ2_S_GRID));
    table(&mut text, "uint32_t", "IQ3_XXS_GRID", narrow(&IQ3_XXS_GRID));
    table(&mut text, "uint32_t", "IQ3_S_GRID", narrow(&IQ3_S_GRID));
    table(&mut text, "uint64_t", "IQ1_GRID", wide(&IQ1_GRID));
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels-cuda/quant_tables.cuh");
    if std::env::var_os("EBBTIDE_RENEW").is_some_and(|value| value == "1") {
        std::fs::write(&path, &text).expect("the file can be written");
    }
    let stored = std::fs::read_to_string(&path).expect("the stored tables");
    assert!(stored == text, "{} differs from src/quant/tables: renew it as this file says", path.display());
}
