//! The `ebbtide` program: runs a command and sets the exit code.

fn main() -> std::process::ExitCode {
    ebbtide::cli::main()
}
