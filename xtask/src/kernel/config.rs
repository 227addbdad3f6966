//! Kernel configuration: what was asked for, and whether it took effect.
//!
//! Kconfig drops, without a word, a line whose option does not exist (any more) or whose
//! dependencies are off. A guest kernel that lacks a feature would then fail far from the cause, so
//! every line of the fragment is compared with the configuration that came out.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use anyhow::{Result, bail};

/// One line of a configuration fragment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Wanted {
    /// Name of the option with its `CONFIG_` prefix.
    pub(super) symbol: String,
    /// The value as written (`y`, a number, a string with its quotes); `None`: off.
    pub(super) value: Option<String>,
}

/// Reads a fragment; a line that is neither empty, a comment nor a setting is an error, as is an
/// option that is named twice.
pub(super) fn parse(text: &str) -> Result<Vec<Wanted>> {
    let mut wanted = Vec::new();
    let mut seen = BTreeSet::new();
    for (line, number) in text.lines().zip(1_u32..) {
        let Some(setting) = parse_line(line) else { bail!("line {number} makes no sense: {line}") };
        let Some(setting) = setting else { continue };
        if !seen.insert(setting.symbol.clone()) {
            bail!("line {number} sets {} a second time", setting.symbol);
        }
        wanted.push(setting);
    }
    Ok(wanted)
}

/// `None`: malformed; `Some(None)`: a comment or an empty line.
fn parse_line(line: &str) -> Option<Option<Wanted>> {
    let line = line.trim_end();
    if let Some(comment) = line.strip_prefix('#') {
        let off = comment.strip_prefix(' ').and_then(|rest| rest.strip_suffix(" is not set"));
        return Some(match off {
            Some(symbol) if is_symbol(symbol) => {
                Some(Wanted { symbol: symbol.to_owned(), value: None })
            }
            _ => None,
        });
    }
    if line.is_empty() {
        return Some(None);
    }
    let (symbol, value) = line.split_once('=')?;
    if !is_symbol(symbol) || value.is_empty() {
        return None;
    }
    let value = (value != "n").then(|| value.to_owned());
    Some(Some(Wanted { symbol: symbol.to_owned(), value }))
}

fn is_symbol(text: &str) -> bool {
    text.strip_prefix("CONFIG_").is_some_and(|name| {
        !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
    })
}

/// Compares a complete `.config` with what was asked for; the error lists every difference.
pub(super) fn verify(wanted: &[Wanted], complete: &str) -> Result<()> {
    let result: BTreeMap<&str, &str> = complete
        .lines()
        .filter(|line| line.starts_with("CONFIG_"))
        .filter_map(|line| line.split_once('='))
        .collect();
    let mut differences = String::new();
    let mut count = 0_u32;
    for Wanted { symbol, value } in wanted {
        let found = result.get(symbol.as_str()).copied();
        if found != value.as_deref() {
            count = count.saturating_add(1);
            let show = |value: Option<&str>| value.unwrap_or("off").to_owned();
            let (asked, got) = (show(value.as_deref()), show(found));
            let _ = write!(differences, "\n  {symbol}: asked for {asked}, got {got}");
        }
    }
    if count > 0 {
        bail!(
            "{count} options of kernel-config/casulo.config did not take effect in this kernel \
             source (a dependency is off, another option selects it, or it does not exist):\
             {differences}"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(symbol: &str, value: Option<&str>) -> Wanted {
        Wanted { symbol: symbol.into(), value: value.map(str::to_owned) }
    }

    #[test]
    fn settings_comments_and_off_lines_are_told_apart() {
        let text = "# Why X is on.\n\nCONFIG_X=y\n# CONFIG_Y is not set\nCONFIG_S=\"a=b\"\n\
                    # CONFIG_Z is not set because of Y\nCONFIG_W=n\nCONFIG_N=0x10\n";
        assert_eq!(
            parse(text).unwrap(),
            [
                wanted("CONFIG_X", Some("y")),
                wanted("CONFIG_Y", None),
                wanted("CONFIG_S", Some("\"a=b\"")),
                wanted("CONFIG_W", None),
                wanted("CONFIG_N", Some("0x10")),
            ]
        );
    }

    #[test]
    fn malformed_lines_are_errors_with_their_number() {
        for bad in ["CONFIG_X", "X=y", "CONFIG_=y", "CONFIG_X=", "CONFIG_X Y=y", " CONFIG_X=y"] {
            let error = parse(&format!("CONFIG_A=y\n{bad}\n")).unwrap_err().to_string();
            assert!(error.contains("line 2"), "{bad}: {error}");
        }
    }

    #[test]
    fn an_option_named_twice_is_an_error() {
        let error = parse("CONFIG_X=y\n# CONFIG_X is not set\n").unwrap_err().to_string();
        assert!(error.contains("CONFIG_X"), "{error}");
    }

    #[test]
    fn a_configuration_that_took_effect_passes() {
        let wanted = parse("CONFIG_X=y\n# CONFIG_Y is not set\nCONFIG_N=7\n").unwrap();
        verify(&wanted, "CONFIG_X=y\n# CONFIG_Y is not set\nCONFIG_N=7\nCONFIG_MORE=y\n").unwrap();
        // An option that is off may also be absent.
        verify(&wanted, "CONFIG_N=7\nCONFIG_X=y\n").unwrap();
    }

    #[test]
    fn every_difference_is_listed() {
        let wanted =
            parse("CONFIG_X=y\n# CONFIG_Y is not set\nCONFIG_N=7\nCONFIG_GONE=y\nCONFIG_OK=y\n")
                .unwrap();
        let error = verify(&wanted, "# CONFIG_X is not set\nCONFIG_Y=y\nCONFIG_N=8\nCONFIG_OK=y\n")
            .unwrap_err()
            .to_string();
        for part in [
            "4 options",
            "CONFIG_X: asked for y, got off",
            "CONFIG_Y: asked for off, got y",
            "CONFIG_N: asked for 7, got 8",
            "CONFIG_GONE: asked for y, got off",
        ] {
            assert!(error.contains(part), "{part}: {error}");
        }
        assert!(!error.contains("CONFIG_OK"), "{error}");
    }
}
