//! The `casulo` command.

fn main() -> ! {
    // The emulated host starts this same binary as its process 1.
    if casulo::emulated::is_init() {
        casulo::emulated::init();
    }
    casulo::protocol::abort_on_panic();
    // Not a return: threads that still read or write must not hold the exit up.
    std::process::exit(i32::from(casulo::cli::main()))
}
