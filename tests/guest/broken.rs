//! A `CASULO_HOME` of which parts are not what they should be.

use std::fs;
use std::path::{Path, PathBuf};

use crate::support::{folder, home, output, run, sha256};

/// A `CASULO_HOME` whose parts are links to the real one, so that one of them can be broken.
pub(crate) struct BrokenHome {
    pub(crate) folder: tempfile::TempDir,
}

impl BrokenHome {
    pub(crate) fn new() -> Self {
        let this = Self { folder: folder() };
        for part in ["kernel", "agent", "emulated"] {
            this.link(part);
        }
        fs::create_dir_all(this.path("images/names")).unwrap();
        fs::create_dir_all(this.path("images/layers")).unwrap();
        for entry in fs::read_dir(home().join("images/names")).unwrap() {
            let entry = entry.unwrap();
            let target = fs::read_link(entry.path()).unwrap();
            std::os::unix::fs::symlink(&target, this.path("images/names").join(entry.file_name()))
                .unwrap();
            let digest = target.file_name().unwrap();
            let image = Path::new("images").join(digest);
            if !this.path(&image).exists() {
                this.link(image);
            }
        }
        for entry in fs::read_dir(home().join("images/layers")).unwrap() {
            this.link(Path::new("images/layers").join(entry.unwrap().file_name()));
        }
        this
    }

    pub(crate) fn path(&self, part: impl AsRef<Path>) -> PathBuf {
        self.folder.path().join(part)
    }

    fn link(&self, part: impl AsRef<Path>) {
        std::os::unix::fs::symlink(home().join(&part), self.path(&part)).unwrap();
    }

    /// A copy of one file instead of the link that leads to it.
    pub(crate) fn own_copy(&self, part: &str) -> PathBuf {
        let (top, file) = part.rsplit_once('/').unwrap();
        if self.path(top).is_symlink() {
            let real = home().join(top);
            fs::remove_file(self.path(top)).unwrap();
            fs::create_dir(self.path(top)).unwrap();
            for entry in fs::read_dir(real).unwrap() {
                self.link(Path::new(top).join(entry.unwrap().file_name()));
            }
        }
        let path = self.path(top).join(file);
        fs::remove_file(&path).unwrap();
        fs::copy(home().join(part), &path).unwrap();
        path
    }

    /// The path, below the home, of the lowest layer of `base`.
    pub(crate) fn base_layer(&self) -> String {
        let text = fs::read_to_string(self.path("images/names/base/image.json")).unwrap();
        let manifest: serde_json::Value = serde_json::from_str(&text).unwrap();
        format!("images/layers/{}.erofs", manifest["layers"][0]["sha256"].as_str().unwrap())
    }

    pub(crate) fn run(&self) -> std::process::Output {
        self.run_with(&[])
    }

    /// Puts `bytes` in the place of `part`, and tells the description beside it.
    pub(crate) fn replace(&self, part: &str, description: &str, bytes: &[u8]) {
        fs::write(self.own_copy(part), bytes).unwrap();
        let text = fs::read_to_string(self.path(description)).unwrap();
        let mut about: serde_json::Value = serde_json::from_str(&text).unwrap();
        about["sha256"] = sha256(bytes).into();
        about["size"] = bytes.len().into();
        fs::remove_file(self.path(description)).unwrap();
        fs::write(self.path(description), about.to_string()).unwrap();
    }

    /// `casulo run` with these options and this home.
    pub(crate) fn run_with(&self, options: &[&str]) -> std::process::Output {
        let mut command = run(options.iter().copied().chain(["--", "true"]));
        command.env("CASULO_HOME", self.folder.path());
        output(command)
    }
}
