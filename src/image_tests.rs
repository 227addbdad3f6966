use std::collections::BTreeMap;

use casulo_protocol::image::Layer;

use super::*;

struct Home {
    folder: tempfile::TempDir,
    store: Store,
}

fn erofs(fill: u8) -> Vec<u8> {
    let mut bytes = vec![fill; 8192];
    bytes[1024..1028].copy_from_slice(&EROFS_MAGIC.to_le_bytes());
    bytes
}

fn manifest(layers: &[Vec<u8>]) -> Manifest {
    Manifest {
        format: FORMAT,
        name: "base".into(),
        architecture: "amd64".into(),
        layers: layers
            .iter()
            .map(|l| Layer { sha256: hex(&Sha256::digest(l)), size: l.len() as u64 })
            .collect(),
        env: BTreeMap::new(),
        workdir: None,
        user: None,
        entrypoint: vec![],
        packages: vec![],
        agent_protocol: agent::VERSION,
        min_kernel: "6.12".into(),
    }
}

impl Home {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let images = folder.path().join("images");
        for sub in ["names", "layers"] {
            std::fs::create_dir_all(images.join(sub)).unwrap();
        }
        let store = Store::new(&images, folder.path().join("state"));
        Self { folder, store }
    }

    fn add(&self, name: &str, layers: &[Vec<u8>], change: impl FnOnce(&mut serde_json::Value)) {
        let images = self.folder.path().join("images");
        for layer in layers {
            let path = images.join("layers").join(format!("{}.erofs", hex(&Sha256::digest(layer))));
            std::fs::write(path, layer).unwrap();
        }
        let mut value = serde_json::to_value(manifest(layers)).unwrap();
        change(&mut value);
        let bytes = serde_json::to_vec(&value).unwrap();
        let digest = hex(&Sha256::digest(&bytes));
        std::fs::create_dir_all(images.join(&digest)).unwrap();
        std::fs::write(images.join(&digest).join(MANIFEST), bytes).unwrap();
        let link = images.join("names").join(name);
        std::os::unix::fs::symlink(format!("../{digest}"), link).unwrap();
    }

    fn layer(&self, content: &[u8]) -> PathBuf {
        let name = format!("{}.erofs", hex(&Sha256::digest(content)));
        self.folder.path().join("images/layers").join(name)
    }
}

#[test]
fn opens_and_verifies_once() {
    let home = Home::new();
    let layer = erofs(1);
    home.add("base", std::slice::from_ref(&layer), |_| {});
    let image = home.store.open("base").unwrap();
    let candidate = &image.layers[0];
    assert!(!home.store.is_verified(candidate));
    home.store.verify(candidate).unwrap();
    assert!(home.store.is_verified(candidate));
    for name in [image.digest.as_str(), &image.digest[..12]] {
        assert_eq!(home.store.open(name).unwrap().digest, image.digest);
    }
}

#[test]
fn a_flipped_byte_is_found_even_when_size_and_mtime_are_restored() {
    let home = Home::new();
    let layer = erofs(1);
    home.add("base", std::slice::from_ref(&layer), |_| {});
    home.store.verify(&home.store.open("base").unwrap().layers[0]).unwrap();
    let path = home.layer(&layer);
    let modified = std::fs::metadata(&path).unwrap().modified().unwrap();
    let mut bytes = layer.clone();
    bytes[5000] ^= 1;
    // The clock of ctime ticks every few milliseconds.
    std::thread::sleep(std::time::Duration::from_millis(30));
    std::fs::write(&path, &bytes).unwrap();
    File::options().write(true).open(&path).unwrap().set_modified(modified).unwrap();
    let image = home.store.open("base").unwrap();
    assert!(!home.store.is_verified(&image.layers[0]));
    let error = home.store.verify(&image.layers[0]).unwrap_err();
    let ImageError::Digest { what, expected, found, .. } = &error else { panic!("{error}") };
    assert_eq!(what, "layer 1 of image `base`");
    assert_eq!(*expected, hex(&Sha256::digest(&layer)));
    assert_eq!(*found, hex(&Sha256::digest(&bytes)));
}

#[test]
fn each_fault_of_a_layer_has_its_own_error() {
    let home = Home::new();
    let (missing, short, long, block) = (erofs(1), erofs(2), erofs(3), erofs(4));
    for (name, layer) in
        [("missing", &missing), ("short", &short), ("long", &long), ("block", &block)]
    {
        home.add(name, std::slice::from_ref(layer), |_| {});
    }
    std::fs::remove_file(home.layer(&missing)).unwrap();
    std::fs::write(home.layer(&short), &short[..4096]).unwrap();
    std::fs::write(home.layer(&long), [long.as_slice(), b"x"].concat()).unwrap();
    let mut broken = block.clone();
    broken[1024] ^= 0xff;
    std::fs::write(home.layer(&block), broken).unwrap();
    let open = |name| home.store.open(name).unwrap_err();
    assert!(matches!(open("missing"), ImageError::Missing { .. }));
    assert!(matches!(open("short"), ImageError::Truncated { found: 4096, expected: 8192, .. }));
    assert!(matches!(open("long"), ImageError::TooLong { found: 8193, .. }));
    assert!(matches!(open("block"), ImageError::Superblock { .. }));
}

#[test]
fn layers_in_the_place_of_each_other_are_found() {
    let home = Home::new();
    let layers = [erofs(1), erofs(2)];
    home.add("base", &layers, |_| {});
    // Each is a good layer of the right size, but not the one that the manifest means.
    std::fs::write(home.layer(&layers[0]), &layers[1]).unwrap();
    std::fs::write(home.layer(&layers[1]), &layers[0]).unwrap();
    let image = home.store.open("base").unwrap();
    for (candidate, (own, other)) in
        image.layers.iter().zip([(&layers[0], &layers[1]), (&layers[1], &layers[0])])
    {
        let error = home.store.verify(candidate).unwrap_err();
        let ImageError::Digest { expected, found, .. } = &error else { panic!("{error}") };
        assert_eq!(*expected, hex(&Sha256::digest(own)));
        assert_eq!(*found, hex(&Sha256::digest(other)));
        assert!(error.to_string().contains("is damaged") && error.to_string().contains("again"));
        assert!(!home.store.is_verified(candidate));
    }
}

#[test]
fn more_layers_than_a_machine_has_room_for_are_refused() {
    let home = Home::new();
    let layers: Vec<Vec<u8>> = (0..12).map(erofs).collect();
    home.add("many", &layers, |_| {});
    home.add("most", &layers[..11], |_| {});
    assert_eq!(home.store.open("most").unwrap().layers.len(), 11);
    let error = home.store.open("many").unwrap_err().to_string();
    assert!(error.contains("12 layers, but 1 to 11 are allowed"), "{error}");
}

#[test]
fn unknown_images_list_the_known_ones() {
    let home = Home::new();
    home.add("dev", &[erofs(1)], |_| {});
    home.add("base", &[erofs(1), erofs(2)], |_| {});
    let text = home.store.open("nope").unwrap_err().to_string();
    assert!(text.contains("`nope`") && text.contains("known images: base, dev"), "{text}");
    for name in ["../base", "a/b", "", ".hidden", "a b"] {
        assert!(matches!(home.store.open(name), Err(ImageError::Name { .. })), "{name}");
    }
}

#[test]
fn manifests_are_strict() {
    let home = Home::new();
    let layer = [erofs(1)];
    home.add("extra", &layer, |v| v["surprise"] = 1.into());
    home.add("format", &layer, |v| v["format"] = 99.into());
    home.add("agent", &layer, |v| v["agent_protocol"] = 99.into());
    home.add("arch", &layer, |v| v["architecture"] = "arm64".into());
    home.add("path", &layer, |v| v["layers"][0]["sha256"] = "../../etc/passwd".into());
    home.add("none", &layer, |v| v["layers"] = serde_json::json!([]));
    let open = |name| home.store.open(name).unwrap_err();
    assert!(matches!(open("extra"), ImageError::Manifest { .. }));
    assert!(open("format").to_string().contains("format 99"));
    assert!(open("agent").to_string().contains("agent protocol 99"));
    assert!(matches!(open("arch"), ImageError::Version { .. }));
    assert!(matches!(open("path"), ImageError::Manifest { .. }));
    assert!(matches!(open("none"), ImageError::Manifest { .. }));
}

#[test]
fn a_changed_manifest_is_found() {
    let home = Home::new();
    home.add("base", &[erofs(1)], |_| {});
    let digest = home.store.list()[0].digest.clone();
    let path = home.folder.path().join("images").join(digest).join(MANIFEST);
    let text = std::fs::read_to_string(&path).unwrap().replace("6.12", "6.13");
    std::fs::write(path, text).unwrap();
    assert!(matches!(home.store.open("base"), Err(ImageError::Digest { .. })));
}

#[test]
fn kernel_and_agent() {
    let home = Home::new();
    let folder = home.folder.path().join("kernel");
    std::fs::create_dir(&folder).unwrap();
    let path = folder.join("vmlinux");
    assert!(matches!(home.store.open_kernel(&path), Err(ImageError::Missing { .. })));
    let mut elf = vec![0u8; 100];
    elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
    elf[18] = 62;
    let describe = |bytes: &[u8]| {
        let sha256 = hex(&Sha256::digest(bytes));
        let text = format!(
            r#"{{"version":"6.12.48","source_sha256":"","config_sha256":"","sha256":"{sha256}","size":{}}}"#,
            bytes.len()
        );
        std::fs::write(folder.join("kernel.json"), text).unwrap();
        std::fs::write(&path, bytes).unwrap();
    };
    describe(&elf);
    let (info, candidate) = home.store.open_kernel(&path).unwrap();
    assert_eq!(info.version, "6.12.48");
    home.store.verify(&candidate).unwrap();
    describe(b"MZ this is a bzImage, not a vmlinux");
    assert!(matches!(home.store.open_kernel(&path), Err(ImageError::Elf { .. })));

    let boot = folder.join("boot.erofs");
    let volume = erofs(7);
    std::fs::write(&boot, &volume).unwrap();
    for (protocol, good) in [(agent::VERSION, true), (agent::VERSION + 1, false)] {
        let sha256 = hex(&Sha256::digest(&volume));
        let text = format!(
            r#"{{"protocol":{protocol},"version":"0.1.0","sha256":"{sha256}","size":8192}}"#
        );
        std::fs::write(folder.join("agent.json"), text).unwrap();
        match home.store.open_agent(&boot) {
            Ok(_) => assert!(good),
            Err(e) => assert!(!good && e.to_string().contains("protocol 2"), "{e}"),
        }
    }
}

#[test]
fn kernel_versions() {
    assert!(check_kernel("6.12", "6.12.48").is_ok());
    assert!(check_kernel("6.12", "7.0").is_ok());
    assert!(check_kernel("6.12", "6.9.1").is_err());
    assert!(check_kernel("six", "6.12").is_err());
}

#[test]
fn the_memory_is_bounded() {
    let home = Home::new();
    home.add("base", &[erofs(1)], |_| {});
    let image = home.store.open("base").unwrap();
    for n in 0..20 {
        home.store.remember(&image.layers[0], &format!("key {n}")).unwrap();
    }
    let text = std::fs::read_to_string(home.store.memory(&image.layers[0])).unwrap();
    assert_eq!(text.lines().count(), MAX_REMEMBERED);
    assert_eq!(text.lines().next(), Some("key 19"));
}
