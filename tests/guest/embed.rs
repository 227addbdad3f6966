//! The library inside another program: `examples/embed.rs`.

use std::process::Command;

use crate::support::{Leftovers, casulo_path, home, output};

#[test]
fn ten_sandboxes_at_once_give_nine_answers_and_one_typed_error() {
    let before = Leftovers::now();
    let casulo = casulo_path();
    let mut command = Command::new(casulo.with_file_name("examples").join("embed"));
    command.arg(casulo.with_file_name("casulo-vmm")).arg(home());
    let out = output(command);
    let text = String::from_utf8_lossy(&out.stdout);
    assert_eq!(out.status.code(), Some(0), "{text}{}", String::from_utf8_lossy(&out.stderr));
    for n in (0..10).filter(|n| *n != 6) {
        assert!(text.contains(&format!("sandbox {n}: {}\n", 499_500 * n)), "{text}");
    }
    assert!(text.contains("sandbox 6: GuestLost: "), "{text}");
    before.assert_unchanged();
}
