//! Rules of the settings of drafts: see [`super::config`] for the rest.

use super::config::Checker;
use super::draft_args::DraftArgs;
use crate::settings::{DraftSetting, DraftSettings, SpecSetting, TokenSource};

impl Checker<'_> {
    pub(super) fn drafts(&mut self, args: &DraftArgs) -> DraftSettings {
        let drafts = DraftSettings {
            always: false,
            source: self.draft_source(args),
            most: args.spec,
            min_p: args.spec_min_p,
            vocab: args.draft_vocab.clone().map(TokenSource::File),
            force_acceptance: None,
        };
        self.warn_of_idle_drafts(&drafts);
        drafts
    }

    /// Who drafts: `--mtp` and `--draft` say the same, so the stronger place holds, and two of one place clash unless they agree.
    fn draft_source(&mut self, args: &DraftArgs) -> DraftSetting {
        let settings = self.settings;
        let Some(mtp) = settings.said("mtp").filter(|_| args.mtp) else { return args.draft };
        match settings.said("draft").filter(|_| args.draft != DraftSetting::Mtp) {
            Some(draft) if draft.source.wins_over(&mtp.source) => return args.draft,
            Some(draft) if !mtp.source.wins_over(&draft.source) => {
                self.refusals.push(format!("{mtp} with {draft}: --mtp is --draft mtp, and both say who drafts. Leave one of them out"));
            }
            _ => {}
        }
        DraftSetting::Mtp
    }

    /// Flags that were given and say nothing, since what they are about is off.
    fn warn_of_idle_drafts(&mut self, drafts: &DraftSettings) {
        if let (DraftSetting::Off, SpecSetting::Drafts(1..), Some(spec)) = (drafts.source, drafts.most, self.settings.said("spec")) {
            self.warnings.push(format!("{spec} has no effect with --draft off: leave one of them out"));
        }
        if drafts.uses_mtp() {
            return;
        }
        for (name, is_set) in [("spec-min-p", drafts.min_p > 0.0), ("draft-vocab", drafts.vocab.is_some())] {
            if let Some(setting) = self.settings.said(name).filter(|_| is_set) {
                self.warnings.push(format!(
                    "{setting} has no effect without the draft layer: leave it out, or let it draft with --draft mtp or both"
                ));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use crate::cli::command::Command;
    use crate::cli::config::tests::checked;
    use crate::settings::{DraftSetting, DraftSettings, SpecSetting, TokenSource};

    fn drafts(line: &str, environment: &[(&str, &str)]) -> (DraftSettings, Vec<String>) {
        let config = checked(&format!("ebbtide plan -m m {line}"), environment).expect(line);
        let Command::Plan(plan) = config.command else { panic!("a plan was asked for") };
        (plan.engine.drafts, config.warnings)
    }

    #[test]
    fn both_sources_draft_as_much_as_pays_unless_somebody_says_otherwise() {
        let (defaults, warnings) = drafts("", &[]);
        assert_eq!((defaults, warnings.len()), (DraftSettings::default(), 0));
        let (asked, warnings) = drafts("--spec 3 --draft mtp --spec-min-p 0.5 --draft-vocab words.txt --deterministic", &[]);
        let expected = DraftSettings {
            always: false,
            source: DraftSetting::Mtp,
            most: SpecSetting::Drafts(3),
            min_p: 0.5,
            vocab: Some(TokenSource::File(PathBuf::from("words.txt"))),
            force_acceptance: None,
        };
        assert_eq!((asked, warnings.len()), (expected, 0));
        assert_eq!(drafts("", &[("EBBTIDE_SPEC", "0")]).0.drafts_max(), 0);
    }

    #[test]
    fn mtp_is_draft_mtp_and_the_stronger_place_holds() {
        let source = |line: &str, environment: &[(&str, &str)]| drafts(line, environment).0.source;
        assert_eq!(source("--mtp", &[]), DraftSetting::Mtp);
        assert_eq!(source("--mtp --draft mtp", &[]), DraftSetting::Mtp);
        assert_eq!(source("--mtp=false --draft lookup", &[]), DraftSetting::Lookup);
        assert_eq!(source("--mtp", &[("EBBTIDE_DRAFT", "off")]), DraftSetting::Mtp);
        assert_eq!(source("--draft off", &[("EBBTIDE_MTP", "1")]), DraftSetting::Off);
        let told = checked("ebbtide plan -m m --mtp --draft both", &[]).expect_err("a clash").0;
        assert_eq!(told, ["--mtp with --draft both: --mtp is --draft mtp, and both say who drafts. Leave one of them out"]);
    }

    #[test]
    fn values_that_are_none_are_refused_with_their_bounds() {
        use crate::cli::sources::resolve;
        let told = |line: &str| {
            let words: Vec<std::ffi::OsString> = format!("ebbtide run {line}").split(' ').map(Into::into).collect();
            resolve(&words, &Vec::new()).expect_err(line).to_string()
        };
        assert_eq!(told("--spec 8"), "--spec 8: 8 is out of bounds: 0 to 7 drafts");
        assert_eq!(told("--draft ngram"), "--draft ngram: `ngram` is not one of: mtp, lookup, both, off");
        assert!(told("--spec-min-p 1.5").starts_with("--spec-min-p 1.5: 1.5 is out of bounds: 0 to 1"));
    }

    #[test]
    fn what_says_nothing_is_warned_of() {
        let warnings = |line: &str| drafts(line, &[]).1;
        assert_eq!(warnings("--spec 0"), Vec::<String>::new());
        assert_eq!(warnings("--draft off --spec 0"), Vec::<String>::new());
        assert_eq!(warnings("--draft off --spec 3"), ["--spec 3 has no effect with --draft off: leave one of them out"]);
        assert_eq!(
            warnings("--spec-min-p 0.5 --draft lookup"),
            ["--spec-min-p 0.5 has no effect without the draft layer: leave it out, or let it draft with --draft mtp or both"]
        );
        assert_eq!(warnings("--draft-vocab f --spec-min-p 0.5 --spec 0").len(), 2);
        assert_eq!(warnings("--draft-vocab f --spec-min-p 0"), Vec::<String>::new());
    }
}
