//! Goal: what the golden files cannot show: refusals, bytes that are no text, size, shields. Method: a small vocabulary made here.

use super::*;
use proptest::prelude::*;

fn stand_in(byte: u8) -> char {
    // Written apart from the table under test: the 68 bytes without a printable Latin-1 character follow U+0100 in order.
    let printable = |byte: u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    if printable(byte) {
        return char::from(byte);
    }
    let place = (0..byte).filter(|&other| !printable(other)).count();
    char::from_u32(0x100 + u32::try_from(place).expect("small")).expect("a character")
}

/// All bytes, a few merges, and special tokens: `<|im_end|>` typed as user-defined, as some files have it.
fn spec() -> TokenizerSpec {
    let mut tokens: Vec<String> = (0..=u8::MAX).map(|byte| stand_in(byte).to_string()).collect();
    let mut merges = Vec::new();
    for pair in ["t h", "th e", "a a", "aa aa", "Ġ the", "- -"] {
        merges.push(pair.to_owned());
        tokens.push(pair.replace(' ', ""));
    }
    let mut token_types = vec![1; tokens.len()];
    for (text, token_type) in [("<|im_start|>", 3), ("<|im_end|>", 4), ("<|endoftext|>", 3), ("<think>", 4), ("[PAD]", 5), ("", 1), ("", 1)]
    {
        tokens.push(text.to_owned());
        token_types.push(token_type);
    }
    let id = |text: &str| tokens.iter().position(|token| token == text).and_then(|place| u32::try_from(place).ok());
    let (bos, eos) = (id("<|endoftext|>"), id("<|im_end|>"));
    TokenizerSpec {
        model: "gpt2".to_owned(),
        pre: Some("qwen2".to_owned()),
        tokens,
        token_types,
        merges,
        bos,
        eos,
        ..TokenizerSpec::default()
    }
}

fn tokenizer() -> Tokenizer {
    Tokenizer::new(&spec()).expect("the vocabulary is whole")
}

fn refusal(change: impl FnOnce(&mut TokenizerSpec)) -> String {
    let mut spec = spec();
    change(&mut spec);
    Tokenizer::new(&spec).expect_err("it is refused").to_string()
}

#[test]
fn unknown_kinds_and_patterns_are_refused_with_what_is_supported() {
    let model = refusal(|spec| spec.model = "llama".to_owned());
    assert_eq!(model, r#"tokenizer.ggml.model is "llama", supported: gpt2"#);
    let pre = refusal(|spec| spec.pre = Some("foo".to_owned()));
    assert!(pre.starts_with(r#"tokenizer.ggml.pre is "foo", supported: qwen2, qwen35"#), "{pre}");
    assert!(refusal(|spec| spec.pre = None).starts_with("tokenizer.ggml.pre is missing"));
    for pre in SUPPORTED_PRE {
        let named = TokenizerSpec { pre: Some((*pre).to_owned()), ..spec() };
        assert!(Tokenizer::new(&named).is_ok(), "{pre}");
    }
}

#[test]
fn hostile_lists_are_refused_by_key_and_number() {
    assert_eq!(refusal(|spec| spec.tokens.clear()), "tokenizer.ggml.tokens is empty");
    assert_eq!(refusal(|spec| spec.token_types.truncate(7)), "tokenizer.ggml.token_type has 7 entries for 269 tokens");
    assert_eq!(
        refusal(|spec| spec.merges[1] = "ab".to_owned()),
        r#"tokenizer.ggml.merges[1] is "ab": two tokens with one space between them are expected"#
    );
    for merge in ["", " ", "a ", " a", "a  b", "a b c"] {
        assert!(refusal(|spec| spec.merges[0] = merge.to_owned()).starts_with("tokenizer.ggml.merges[0]"), "{merge:?}");
    }
    assert_eq!(refusal(|spec| spec.merges[0] = "q z".to_owned()), r#"tokenizer.ggml.merges[0] is "q z", but "qz" is no token"#);
    assert_eq!(refusal(|spec| spec.merges[0] = "xy z".to_owned()), r#"tokenizer.ggml.merges[0] is "xy z", but "xyz" is no token"#);
    assert_eq!(refusal(|spec| spec.tokens[3] = "the".to_owned()), r#"tokenizer.ggml.tokens has "the" twice, as 3 and 257"#);
    assert_eq!(refusal(|spec| spec.tokens[10] = "newline".to_owned()), "tokenizer.ggml.tokens has no token for the byte 0x0a");
}

#[test]
fn ids_past_the_vocabulary_are_refused_by_name() {
    assert_eq!(refusal(|spec| spec.eos = Some(1 << 31)), "tokenizer.ggml.eos_token_id is 2147483648, but there are 269 tokens");
    assert!(refusal(|spec| spec.bos = Some(269)).starts_with("tokenizer.ggml.bos_token_id is 269"));
    assert!(refusal(|spec| spec.eot = Some(300)).starts_with("tokenizer.ggml.eot_token_id is 300"));
    assert!(refusal(|spec| spec.pad = Some(u32::MAX)).starts_with("tokenizer.ggml.padding_token_id is 4294967295"));
    assert!(refusal(|spec| (spec.add_bos, spec.bos) = (Some(true), None)).starts_with("tokenizer.ggml.add_bos_token is true"));
}

#[test]
fn every_end_token_of_the_file_ends_an_answer() {
    let named = |text: &str| tokenizer().token_id(text).expect("it is a token");
    let tokenizer = Tokenizer::new(&TokenizerSpec { eot: Some(7), ..spec() }).expect("whole");
    let ends = [7, named("<|im_end|>"), named("<|endoftext|>")];
    assert_eq!(tokenizer.end_tokens(), ends);
    assert!(ends.iter().all(|&token| tokenizer.is_end(token)));
    assert!(!tokenizer.is_end(named("<|im_start|>")) && !tokenizer.is_end(named("<think>")));
}

#[test]
fn nothing_is_added_and_the_start_token_is_named_only_where_the_file_asks() {
    let asking = Tokenizer::new(&TokenizerSpec { add_bos: Some(true), ..spec() }).expect("whole");
    assert_eq!(asking.encode(b"a", Specials::Parse).expect("encodes"), [u32::from(b'a')]);
    assert_eq!(asking.leading_bos(), spec().bos);
    assert_eq!(tokenizer().leading_bos(), None);
}

#[test]
fn text_never_becomes_a_control_token_unless_asked() {
    let tokenizer = tokenizer();
    let ids = |specials| tokenizer.encode(b"a<|im_end|><think>", specials).expect("encodes");
    let (end, think) = (tokenizer.token_id("<|im_end|>").expect("token"), tokenizer.token_id("<think>").expect("token"));
    assert_eq!(ids(Specials::Parse), [u32::from(b'a'), end, think]);
    let plain = ids(Specials::AsText);
    assert!(!plain.contains(&end) && plain.ends_with(&[think]), "{plain:?}");
    assert_eq!(tokenizer.decode(&plain, ControlText::Hide), b"a<|im_end|><think>");
}

#[test]
fn a_longer_special_token_wins_over_an_earlier_one() {
    let mut spec = spec();
    for text in ["<a", "a<bc>"] {
        spec.tokens.push(text.to_owned());
        spec.token_types.push(4);
    }
    let tokenizer = Tokenizer::new(&spec).expect("whole");
    let long = tokenizer.token_id("a<bc>").expect("token");
    assert_eq!(tokenizer.encode(b"<a<bc>", Specials::AsText).expect("encodes"), [u32::from(b'<'), long]);
}

#[test]
fn shielded_text_is_plain_text_in_a_rendered_chat() {
    let tokenizer = tokenizer();
    for content in
        ["the <|im_end|> the", "<|im_end|><|im_end|>", "a\u{fdd0}b <\u{fdd0}|im_end|> \u{fdd0}\u{fdd0}", "<<|im_start|>>", "no tokens"]
    {
        let shielded = tokenizer.shield(content);
        assert_eq!(unshield(&shielded), content);
        let ids = tokenizer.encode_chat(&format!("<|im_start|>{shielded}<|im_end|>")).expect("encodes");
        let (first, last) = (tokenizer.token_id("<|im_start|>").expect("token"), tokenizer.token_id("<|im_end|>").expect("token"));
        let inner = tokenizer.encode(content.as_bytes(), Specials::AsText).expect("encodes");
        assert_eq!(ids, [vec![first], inner, vec![last]].concat(), "{content:?}");
    }
}

#[test]
fn tokens_without_text_and_rows_past_the_list_decode_to_nothing() {
    let tokenizer = tokenizer();
    let pad = tokenizer.token_id("[PAD]").expect("token");
    assert_eq!(tokenizer.decode(&[pad, pad + 1, 10_000, u32::MAX], ControlText::Show), b"");
}

#[test]
fn long_words_merge_as_short_ones_do() {
    let tokenizer = tokenizer();
    let four = tokenizer.token_id("aaaa").expect("token");
    assert_eq!(tokenizer.encode(&[b'a'; 40], Specials::Parse).expect("encodes"), [four; 10]);
    assert_eq!(tokenizer.encode(&[b'a'; 400], Specials::Parse).expect("encodes"), [four; 100]);
}

/// A quadratic method would take hours for these.
#[test]
fn a_megabyte_without_a_space_is_encoded_in_seconds() {
    let tokenizer = tokenizer();
    let started = std::time::Instant::now();
    for word in ["a", "thea", "-", "\u{301}", " ", "\n ", "\u{3000}", "'", "9", "<|im_end|>", "<|im_"] {
        let text = word.repeat((1 << 20) / word.len());
        let ids = tokenizer.encode(text.as_bytes(), Specials::Parse).expect("encodes");
        assert_eq!(tokenizer.decode(&ids, ControlText::Show), text.as_bytes(), "{word:?}");
    }
    assert!(started.elapsed().as_secs() < 60, "11 MiB took {:?}", started.elapsed());
}

fn any_bytes() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        any::<char>().prop_map(|character| character.to_string().into_bytes()),
        proptest::sample::select(vec![" ", "the", "  ", "\r\n", "<|im_end|>", "<think>", "<|", "'s", "a\u{301}", "aaaa"])
            .prop_map(|text| text.as_bytes().to_vec()),
        proptest::collection::vec(any::<u8>(), 0..4),
    ];
    proptest::collection::vec(piece, 0..30).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn any_bytes_come_back(bytes in any_bytes()) {
        let tokenizer = tokenizer();
        for specials in [Specials::Parse, Specials::AsText] {
            let ids = tokenizer.encode(&bytes, specials).expect("encodes");
            prop_assert_eq!(tokenizer.decode(&ids, ControlText::Show), bytes.clone());
        }
    }

    #[test]
    fn any_text_is_the_same_after_shield_and_unshield(text in "[<|a>\u{fdd0}]{0,8}(<\\|im_end\\|>)?[<|im_end>\u{fdd0}]{0,12}") {
        let tokenizer = tokenizer();
        let shielded = tokenizer.shield(&text);
        prop_assert_eq!(unshield(&shielded), text.as_str());
        let ids = tokenizer.encode_chat(&shielded).expect("encodes");
        prop_assert_eq!(ids, tokenizer.encode(text.as_bytes(), Specials::AsText).expect("encodes"));
    }

    /// The heap and the scan are two ways to one result: a word on each side of the border, cut from the same letters.
    #[test]
    fn both_ways_of_merging_agree(word in "[the-]{2,48}") {
        let tokenizer = tokenizer();
        let mut by_scan = WordEncoder::new(&tokenizer.merges, &tokenizer.vocabulary, 0);
        by_scan.merge_by_scan(word.as_bytes());
        let mut by_heap = WordEncoder::new(&tokenizer.merges, &tokenizer.vocabulary, 0);
        by_heap.merge_by_heap(word.as_bytes());
        prop_assert_eq!(by_scan.finish(), by_heap.finish());
    }
}
