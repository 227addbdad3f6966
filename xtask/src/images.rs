//! Builds the guest images and the boot volume; `rootfs/README.md` describes the result.
//!
//! mmdebstrap makes a tar of each image's whole root file system. The rest happens here, in memory
//! and without privileges: what does not belong into an image is left out, users and folders are
//! added, what a lower layer already has is taken away, and the erofs file is written.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use casulo_protocol::{agent, image};

use self::progress::Progress;
use self::recipe::Recipe;
use self::tree::{Data, Inode, Kind, Tree};
use crate::paths;

mod boot;
mod debian;
mod erofs;
mod npm;
mod progress;
mod recipe;
mod store;
mod tree;

/// Part of the key of the cache: to be raised when this program makes other bytes of a recipe.
const BUILDER: u32 = 1;
/// Oldest guest kernel that the images are meant for.
const MIN_KERNEL: &str = "6.12";
/// The images, in an order in which each comes after those that it builds on.
const IMAGES: [&str; 3] = ["base", "dev", "node"];
/// Those that are made only when they are asked for.
const EXTRA: [&str; 1] = ["node"];
/// Digits of the key in the name of a folder of the cache.
const KEY: usize = 16;
/// Begin of the names of folders in which an image is being built.
const WORK: &str = ".work-";

/// Options.
#[derive(clap::Args, Default)]
pub(crate) struct Args {
    /// Build only this: `base`, `dev`, `node` (which is left out else) or `agent` (the boot volume)
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
    /// Take the newest packages and write their versions to `rootfs/*.lock`
    #[arg(long)]
    update: bool,
    /// The same bytes everywhere, as for a release: fails when the archive no longer has the versions
    /// in `rootfs/*.lock`, and builds the agent apart, without the paths of this machine in it
    #[arg(long, conflicts_with = "update")]
    pub(crate) locked: bool,
}

/// A volume made as the boot volume is, with this program as `/init`.
pub(crate) fn boot_volume(init: Vec<u8>) -> Result<Vec<u8>> {
    boot::volume(init)
}

/// Options.
#[derive(clap::Args)]
pub(crate) struct VolumeArgs {
    /// A static program, which becomes `/init`
    program: PathBuf,
    /// The erofs file to write
    volume: PathBuf,
}

/// Writes a volume to a file.
pub(crate) fn make_volume(args: &VolumeArgs) -> Result<()> {
    let program = fs::read(&args.program)
        .with_context(|| format!("cannot read {}", args.program.display()))?;
    fs::write(&args.volume, boot_volume(program)?)
        .with_context(|| format!("cannot write {}", args.volume.display()))
}

impl Args {
    /// One image and those below it.
    pub(crate) fn only(name: &str) -> Self {
        Self { only: Some(name.to_owned()), ..Self::default() }
    }
}

pub(crate) fn run(args: Args) -> Result<()> {
    let only = args.only.as_deref();
    if let Some(name) = only.filter(|name| *name != "agent" && !IMAGES.contains(name)) {
        bail!("there is no image {name:?}; there are agent, {}", IMAGES.join(", "));
    }
    if only.is_none_or(|name| name == "agent") {
        boot::build(args.locked)?;
    }
    let cache = paths::cache()?.join("images");
    store::folder(&cache)?;
    let lock = File::create(cache.join(".lock")).context("cannot lock the cache")?;
    lock.lock().context("cannot lock the cache")?;
    remove(&cache, |name| name.starts_with(WORK))?;
    for name in IMAGES {
        // Asked for by name, an image still needs those below it, which are seldom out of date.
        let recipe = Recipe::load(&paths::root().join("rootfs"), name)?;
        let needed = match only {
            None => !EXTRA.contains(&name),
            Some(wanted) => {
                wanted == name
                    || (wanted != "agent"
                        && Recipe::load(&paths::root().join("rootfs"), wanted)?
                            .parents
                            .iter()
                            .any(|parent| parent == name))
            }
        };
        if needed {
            build(&cache, recipe, &args).with_context(|| format!("image {name}"))?;
        }
    }
    Ok(())
}

/// An image in the cache: `image.json`, `rootfs.tar` and the erofs file of its own layer.
struct Built {
    folder: PathBuf,
    json: Vec<u8>,
    manifest: image::Manifest,
}

impl Built {
    fn open(folder: PathBuf) -> Result<Built> {
        let path = folder.join(image::MANIFEST);
        let json = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let manifest = serde_json::from_slice(&json)
            .with_context(|| format!("{} is damaged; delete its folder", path.display()))?;
        Ok(Built { folder, json, manifest })
    }
}

/// Builds one image, unless it is in the cache, and installs it.
fn build(cache: &Path, mut recipe: Recipe, args: &Args) -> Result<()> {
    let below = match recipe.parents.last() {
        None => None,
        Some(parent) => Some(Built::open(cache.join(fs::read_link(cache.join(parent))?))?),
    };
    if args.update {
        recipe.lock.clear();
    }
    let mut folder = cache.join(folder_name(&recipe, below.as_ref())?);
    let progress = Progress::new(&recipe.name);
    let fresh = args.update || !folder.join(image::MANIFEST).exists();
    if fresh {
        let work = tempfile::Builder::new()
            .prefix(WORK)
            .tempdir_in(cache)
            .with_context(|| format!("cannot make a folder in {}", cache.display()))?;
        let packages = make(work.path(), &recipe, below.as_ref(), &progress)?;
        if recipe.lock.is_empty() {
            write_lock(&recipe.name, &packages)?;
            recipe.lock = packages;
            folder = cache.join(folder_name(&recipe, below.as_ref())?);
        }
        let old = format!("{}-", recipe.name);
        remove(cache, |name| name.strip_prefix(&old).is_some_and(|key| key.len() == KEY))?;
        fs::rename(work.keep(), &folder).context("cannot put the image into the cache")?;
    }
    // So that an image on top finds it.
    store::point(&cache.join(&recipe.name), Path::new(folder.file_name().unwrap_or_default()))?;
    let built = Built::open(folder)?;
    check_lock(&recipe, &built.manifest.packages, args)?;
    let installed = install(&built)?;
    if fresh || installed {
        let bytes: u64 = built.manifest.layers.iter().map(|layer| layer.size).sum();
        progress.done(&format!(
            "{} packages, {} layers, {} MiB, digest {}",
            built.manifest.packages.len(),
            built.manifest.layers.len(),
            bytes >> 20,
            store::digest(&built.json).get(..12).unwrap_or_default(),
        ));
    } else {
        progress.done("up to date");
    }
    Ok(())
}

/// Name in the cache, from all that the image depends on.
fn folder_name(recipe: &Recipe, below: Option<&Built>) -> Result<String> {
    let layers = below.map(|b| b.manifest.layers.as_slice()).unwrap_or_default();
    let key = store::digest(&serde_json::to_vec(&(BUILDER, MIN_KERNEL, recipe, layers))?);
    Ok(format!("{}-{}", recipe.name, key.get(..KEY).unwrap_or_default()))
}

/// Makes `image.json`, `rootfs.tar` and the layer in a folder, and gives the packages.
fn make(
    work: &Path,
    recipe: &Recipe,
    below: Option<&Built>,
    progress: &Progress,
) -> Result<Vec<String>> {
    let tar = work.join("rootfs.tar");
    // What lies below has its version even where this image has no lock file yet.
    let below_pins = below.map(|b| b.manifest.packages.as_slice()).unwrap_or_default();
    let pins = if recipe.lock.is_empty() { below_pins } else { recipe.lock.as_slice() };
    debian::bootstrap(recipe, pins, &tar, progress)?;
    progress.step("writing the layer");
    let mut tree = Tree::from_tar(&tar, recipe.epoch)?;
    let packages = debian::packages(&tree)?;
    if let Some(npm) = &recipe.npm {
        progress.step("fetching packages of npm");
        npm::add(&mut tree, npm, work, recipe.epoch)?;
    }
    finish(&mut tree, recipe)?;
    let mut layers = Vec::new();
    if let Some(below) = below {
        // The tar below holds all layers below.
        let mut lower = Tree::from_tar(&below.folder.join("rootfs.tar"), recipe.epoch)?;
        let parent = recipe.parents.last().context("no parent")?;
        finish(&mut lower, &Recipe::load(&paths::root().join("rootfs"), parent)?)?;
        tree = tree.diff(&lower, recipe.epoch)?;
        layers.clone_from(&below.manifest.layers);
    }
    let file = work.join("layer.erofs");
    let (sha256, size) =
        store::create(&file, |mut out| erofs::write(&tree, recipe.epoch, [0; 16], &mut out))?;
    fs::rename(&file, work.join(format!("{sha256}.erofs")))?;
    layers.push(image::Layer { sha256, size });
    let manifest = image::Manifest {
        format: image::FORMAT,
        name: recipe.name.clone(),
        architecture: "amd64".into(),
        layers,
        env: recipe.env.clone(),
        workdir: recipe.workdir.clone(),
        user: recipe.user.clone(),
        entrypoint: recipe.entrypoint.clone(),
        packages: packages.clone(),
        agent_protocol: agent::VERSION,
        min_kernel: MIN_KERNEL.into(),
    };
    let mut json = serde_json::to_vec_pretty(&manifest)?;
    json.push(b'\n');
    store::put(&work.join(image::MANIFEST), &json)?;
    Ok(packages)
}

fn lock_file(name: &str) -> PathBuf {
    paths::root().join("rootfs").join(format!("{name}.lock"))
}

fn write_lock(name: &str, packages: &[String]) -> Result<()> {
    let path = lock_file(name);
    fs::write(&path, recipe::format_lock(name, packages))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Compares the packages of an image with the lock file.
fn check_lock(recipe: &Recipe, packages: &[String], args: &Args) -> Result<()> {
    let path = lock_file(&recipe.name);
    let missing: Vec<&str> =
        recipe.lock.iter().filter(|line| !packages.contains(line)).map(String::as_str).collect();
    let instead: Vec<&str> =
        packages.iter().filter(|line| !recipe.lock.contains(line)).map(String::as_str).collect();
    if missing.is_empty() && instead.is_empty() {
        return Ok(());
    }
    let said = format!(
        "Debian's archive no longer has what {} pins: wanted {}; got {}.",
        path.display(),
        missing.join(" "),
        instead.join(" ")
    );
    if args.locked {
        bail!("{said} `cargo xtask images --update` takes the new versions.");
    }
    eprintln!(
        "warning: {said} The image is built with the new versions and has another digest than the \
         pinned one. `cargo xtask images --update` pins them."
    );
    Ok(())
}

/// Leaves out what the recipe excludes, and adds users, folders and files.
fn finish(tree: &mut Tree, recipe: &Recipe) -> Result<()> {
    tree.retain(|path, _| !recipe.exclude.iter().any(|pattern| recipe::matches(pattern, path)));
    let own = |mut inode: Inode, owner: u32| {
        (inode.uid, inode.gid) = (owner, owner);
        inode
    };
    for spec in &recipe.folders {
        let inode = Inode::new(Kind::Dir, recipe::mode(&spec.mode)?, recipe.epoch);
        tree.insert(relative(&spec.path)?, own(inode, spec.owner))?;
    }
    for spec in &recipe.files {
        let data = Data::Bytes(spec.content.trim_start_matches('\n').as_bytes().to_vec());
        let inode = Inode::new(Kind::File(data), recipe::mode(&spec.mode)?, recipe.epoch);
        tree.insert(relative(&spec.path)?, own(inode, spec.owner))?;
    }
    for user in &recipe.users {
        let (name, id) = (&user.name, user.id);
        let passwd = format!("{name}:x:{id}:{id}::{}:{}\n", user.home, user.shell);
        append(tree, "etc/passwd", &passwd, recipe.epoch)?;
        append(tree, "etc/group", &format!("{name}:x:{id}:\n"), recipe.epoch)?;
    }
    Ok(())
}

fn append(tree: &mut Tree, path: &str, line: &str, epoch: u64) -> Result<()> {
    let mut bytes = tree.file(path)?.with_context(|| format!("there is no /{path}"))?;
    bytes.extend_from_slice(line.as_bytes());
    tree.insert(path.as_bytes(), Inode::new(Kind::File(Data::Bytes(bytes)), 0o644, epoch))
}

fn relative(path: &str) -> Result<&[u8]> {
    let relative = path.strip_prefix('/').with_context(|| format!("{path} is not absolute"))?;
    ensure!(
        relative.split('/').all(|part| !part.is_empty() && part != "." && part != ".."),
        "{path} is not a plain path"
    );
    Ok(relative.as_bytes())
}

/// Removes folders of the cache by name: older states of a recipe, what a killed run left.
fn remove(cache: &Path, doomed: impl Fn(&str) -> bool) -> Result<()> {
    for entry in fs::read_dir(cache)?.flatten() {
        let path = entry.path();
        if doomed(&entry.file_name().to_string_lossy()) && path.is_dir() && !path.is_symlink() {
            fs::remove_dir_all(&path)
                .with_context(|| format!("cannot remove {}", path.display()))?;
        }
    }
    Ok(())
}

/// Puts an image into `CASULO_HOME`; tells whether anything was missing there.
fn install(built: &Built) -> Result<bool> {
    let images = paths::casulo_home()?.join("images");
    let (layers, names) = (images.join("layers"), images.join("names"));
    let digest = store::digest(&built.json);
    let folder = images.join(&digest);
    for path in [&layers, &names, &folder] {
        store::folder(path)?;
    }
    let mut changed = false;
    for layer in &built.manifest.layers {
        let name = format!("{}.erofs", layer.sha256);
        let there = layers.join(&name);
        if fs::metadata(&there).is_ok_and(|meta| meta.len() == layer.size) {
            continue;
        }
        // The last layer is the image's own; lower ones were installed with theirs.
        let here = built.folder.join(&name);
        ensure!(here.exists(), "layer {name} is missing; build the image below first");
        store::place(&here, &there)?;
        changed = true;
    }
    store::put(&folder.join(image::MANIFEST), &built.json)?;
    let link = names.join(&built.manifest.name);
    let target = Path::new("..").join(&digest);
    changed |= fs::read_link(&link).map_or(true, |old| old != target);
    store::point(&link, &target)?;
    Ok(changed)
}
