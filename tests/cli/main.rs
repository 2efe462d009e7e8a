//! Goal: the program keeps the contract of its command line, whatever it is given. Method: the built binary runs as a child, in an
//! environment of its own; exit code, stdout and stderr are looked at from outside. No test may see a panic or a death by signal.

#[path = "../common/mod.rs"]
mod common;
#[allow(unused_macros, unused_imports, reason = "shared with the tests of the reader")]
#[path = "../gguf_bytes/mod.rs"]
mod gguf_bytes;

mod alias;
mod bench;
mod commands;
mod drafts;
mod hashes;
mod hostile;
mod odd_calls;
mod page;
mod plan;
mod profile;
mod program;
mod replay;
#[cfg(unix)]
mod signals;
