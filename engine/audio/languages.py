"""Names and codes (ISO 639) of the languages that Whisper knows, as its authors wrote them."""

from __future__ import annotations

_WRITTEN = """
en=english zh=chinese de=german es=spanish ru=russian ko=korean fr=french ja=japanese pt=portuguese tr=turkish
pl=polish ca=catalan nl=dutch ar=arabic sv=swedish it=italian id=indonesian hi=hindi fi=finnish vi=vietnamese
he=hebrew uk=ukrainian el=greek ms=malay cs=czech ro=romanian da=danish hu=hungarian ta=tamil no=norwegian th=thai
ur=urdu hr=croatian bg=bulgarian lt=lithuanian la=latin mi=maori ml=malayalam cy=welsh sk=slovak te=telugu fa=persian
lv=latvian bn=bengali sr=serbian az=azerbaijani sl=slovenian kn=kannada et=estonian mk=macedonian br=breton eu=basque
is=icelandic hy=armenian ne=nepali mn=mongolian bs=bosnian kk=kazakh sq=albanian sw=swahili gl=galician mr=marathi
pa=punjabi si=sinhala km=khmer sn=shona yo=yoruba so=somali af=afrikaans oc=occitan ka=georgian be=belarusian tg=tajik
sd=sindhi gu=gujarati am=amharic yi=yiddish lo=lao uz=uzbek fo=faroese ht=haitian_creole ps=pashto tk=turkmen
nn=nynorsk mt=maltese sa=sanskrit lb=luxembourgish my=myanmar bo=tibetan tl=tagalog mg=malagasy as=assamese tt=tatar
haw=hawaiian ln=lingala ha=hausa ba=bashkir jw=javanese su=sundanese yue=cantonese
"""
# Other names for the same languages.
_ALSO = """
burmese=my valencian=ca flemish=nl haitian=ht letzeburgesch=lb pushto=ps panjabi=pa moldavian=ro moldovan=ro
sinhalese=si castilian=es mandarin=zh
"""


def _pairs(written: str) -> list[tuple[str, str]]:
    return [(left, right) for left, _, right in (p.replace("_", " ").partition("=") for p in written.split())]


_NAMES = dict(_pairs(_WRITTEN))
_CODES = {name: code for code, name in _NAMES.items()} | dict(_pairs(_ALSO))


def language_codes() -> list[str]:
    return list(_NAMES)


def language_name(code: str) -> str:
    return _NAMES.get(code, code)


def language_code(given: str) -> str:
    return _CODES.get(given.lower(), given.lower())
