"""The papers that methods and post-processing come from.

Receives: nothing.
Gives: one Citation each, for ``clipwise cite`` and reports.
"""

from clipwise.types import Citation

ABADI_2016 = Citation(
    "abadi2016deep",
    "Abadi, Martin and Chu, Andy and Goodfellow, Ian and McMahan, H. Brendan and Mironov, Ilya and Talwar, Kunal "
    "and Zhang, Li",
    "Deep Learning with Differential Privacy",
    "ACM Conference on Computer and Communications Security",
    2016,
)
ANDREW_2021 = Citation(
    "andrew2021differentially",
    "Andrew, Galen and Thakkar, Om and McMahan, H. Brendan and Ramaswamy, Swaroop",
    "Differentially Private Learning with Adaptive Clipping",
    "Advances in Neural Information Processing Systems",
    2021,
)
BU_2023_AUTOMATIC = Citation(
    "bu2023automatic",
    "Bu, Zhiqi and Wang, Yu-Xiang and Zha, Sheng and Karypis, George",
    "Automatic Clipping: Differentially Private Deep Learning Made Easier and Stronger",
    "Advances in Neural Information Processing Systems",
    2023,
)
BU_2023_CONVERGENCE = Citation(
    "bu2023convergence",
    "Bu, Zhiqi and Wang, Hua and Dai, Zongyu and Long, Qi",
    "On the Convergence and Calibration of Deep Learning with Differential Privacy",
    "Transactions on Machine Learning Research",
    2023,
    "article",
)
DE_2022 = Citation(
    "de2022unlocking",
    "De, Soham and Berrada, Leonard and Hayes, Jamie and Smith, Samuel L. and Balle, Borja",
    "Unlocking High-Accuracy Differentially Private Image Classification through Scale",
    "arXiv 2204.13650",
    2022,
    "misc",
)
KNOLLE_2023 = Citation(
    "knolle2023bias",
    "Knolle, Moritz and Dorfman, Robert and Ziller, Alexander and Rueckert, Daniel and Kaissis, Georgios",
    "Bias-Aware Minimisation: Understanding and Mitigating Estimator Bias in Private SGD",
    "arXiv 2308.12018",
    2023,
    "misc",
)
MCMAHAN_2018 = Citation(
    "mcmahan2018general",
    "McMahan, H. Brendan and Andrew, Galen and Erlingsson, Ulfar and Chien, Steve and Mironov, Ilya and Papernot, "
    "Nicolas and Kairouz, Peter",
    "A General Approach to Adding Differential Privacy to Iterative Training Procedures",
    "NeurIPS Workshop on Privacy Preserving Machine Learning",
    2018,
)
PARK_2023 = Citation(
    "park2023differentially",
    "Park, Jinseong and Kim, Hoki and Choi, Yujin and Lee, Jaewook",
    "Differentially Private Sharpness-Aware Training",
    "International Conference on Machine Learning",
    2023,
)
TANG_2024 = Citation(
    "tang2024dp",
    "Tang, Qiaoyue and Shpilevskiy, Frederick and Lécuyer, Mathias",
    "DP-AdamBC: Your DP-Adam Is Actually DP-SGD (Unless You Apply Bias Correction)",
    "AAAI Conference on Artificial Intelligence",
    2024,
)
XIA_2023 = Citation(
    "xia2023differentially",
    "Xia, Tianyu and Shen, Shuheng and Yao, Su and Fu, Xinyi and Xu, Ke and Xu, Xiaolong and Fu, Xing",
    "Differentially Private Learning with Per-Sample Adaptive Clipping",
    "AAAI Conference on Artificial Intelligence",
    2023,
)
XIAO_2023 = Citation(
    "xiao2023theory",
    "Xiao, Hanshen and Xiang, Zihang and Wang, Di and Devadas, Srinivas",
    "A Theory to Instruct Differentially-Private Learning via Clipping Bias Reduction",
    "IEEE Symposium on Security and Privacy",
    2023,
)
YANG_2022 = Citation(
    "yang2022normalized",
    "Yang, Xiaodong and Zhang, Huishuai and Chen, Wei and Liu, Tie-Yan",
    "Normalized/Clipped SGD with Perturbation for Differentially Private Non-Convex Optimization",
    "arXiv 2206.13033",
    2022,
    "misc",
)
ZHANG_2024_DICE = Citation(
    "zhang2024differentially",
    "Zhang, Xinwei and Bu, Zhiqi and Wu, Zhiwei Steven and Hong, Mingyi",
    "Differentially Private SGD Without Clipping Bias: An Error-Feedback Approach",
    "International Conference on Learning Representations",
    2024,
)
ZHANG_2024_DOPPLER = Citation(
    "zhang2024doppler",
    "Zhang, Xinwei and Bu, Zhiqi and Hong, Mingyi and Razaviyayn, Meisam",
    "DOPPLER: Differentially Private Optimizers with Low-pass Filter for Privacy Noise Reduction",
    "Advances in Neural Information Processing Systems",
    2024,
)
ZHANG_2025_DISK = Citation(
    "zhang2025disk",
    "Zhang, Xinwei and Bu, Zhiqi and Balle, Borja and Hong, Mingyi and Razaviyayn, Meisam and Mirrokni, Vahab",
    "DiSK: Differentially Private Optimizer with Simplified Kalman Filter for Noise Reduction",
    "International Conference on Learning Representations",
    2025,
)
