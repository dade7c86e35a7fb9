"""The papers that networks come from and methods do not.

Receives: nothing.
Gives: one Citation each, for the table of networks.
"""

from clipwise.types import Citation

CHO_2014 = Citation(
    "cho2014learning",
    "Cho, Kyunghyun and van Merrienboer, Bart and Gulcehre, Caglar and Bahdanau, Dzmitry and Bougares, Fethi and "
    "Schwenk, Holger and Bengio, Yoshua",
    "Learning Phrase Representations using RNN Encoder-Decoder for Statistical Machine Translation",
    "Conference on Empirical Methods in Natural Language Processing",
    2014,
)
DOSOVITSKIY_2021 = Citation(
    "dosovitskiy2021image",
    "Dosovitskiy, Alexey and Beyer, Lucas and Kolesnikov, Alexander and Weissenborn, Dirk and Zhai, Xiaohua and "
    "Unterthiner, Thomas and Dehghani, Mostafa and Minderer, Matthias and Heigold, Georg and Gelly, Sylvain and "
    "Uszkoreit, Jakob and Houlsby, Neil",
    "An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale",
    "International Conference on Learning Representations",
    2021,
)
HE_2016 = Citation(
    "he2016deep",
    "He, Kaiming and Zhang, Xiangyu and Ren, Shaoqing and Sun, Jian",
    "Deep Residual Learning for Image Recognition",
    "IEEE Conference on Computer Vision and Pattern Recognition",
    2016,
)
HOCHREITER_1997 = Citation(
    "hochreiter1997long",
    "Hochreiter, Sepp and Schmidhuber, Jürgen",
    "Long Short-Term Memory",
    "Neural Computation",
    1997,
    "article",
)
KLAUSE_2022 = Citation(
    "klause2022differentially",
    "Klause, Helena and Ziller, Alexander and Rueckert, Daniel and Hammernik, Kerstin and Kaissis, Georgios",
    "Differentially Private Training of Residual Networks with Scale Normalisation",
    "arXiv 2203.00324",
    2022,
    "misc",
)
RADFORD_2019 = Citation(
    "radford2019language",
    "Radford, Alec and Wu, Jeffrey and Child, Rewon and Luan, David and Amodei, Dario and Sutskever, Ilya",
    "Language Models are Unsupervised Multitask Learners",
    "OpenAI technical report",
    2019,
    "misc",
)
TRAMER_2021 = Citation(
    "tramer2021differentially",
    "Tramèr, Florian and Boneh, Dan",
    "Differentially Private Learning Needs Better Features (or Much More Data)",
    "International Conference on Learning Representations",
    2021,
)
VASWANI_2017 = Citation(
    "vaswani2017attention",
    "Vaswani, Ashish and Shazeer, Noam and Parmar, Niki and Uszkoreit, Jakob and Jones, Llion and Gomez, Aidan N. "
    "and Kaiser, Lukasz and Polosukhin, Illia",
    "Attention Is All You Need",
    "Advances in Neural Information Processing Systems",
    2017,
)
YOUSEFPOUR_2021 = Citation(
    "yousefpour2021opacus",
    "Yousefpour, Ashkan and Shilov, Igor and Sablayrolles, Alexandre and Testuggine, Davide and Prasad, Karthik and "
    "Malek, Mani and Nguyen, John and Ghosh, Sayan and Bharadwaj, Akash and Zhao, Jessica and Cormode, Graham and "
    "Mironov, Ilya",
    "Opacus: User-Friendly Differential Privacy Library in PyTorch",
    "arXiv 2109.12298",
    2021,
    "misc",
)
